"""Channel-wise minimum and maximum of a block's keys: the index of OasisKV and Quest."""

from typing import Any, ClassVar

from torch import Tensor

from ..ops import Parts, Queries, Scores
from .base import Index
from .kernel import IndexKernel


class BoundsKernel(IndexKernel):
    """Bounds of every block, whose keys' types the kernels tell by themselves."""

    form = "bounds"

    def scan(self, ops: Any, index: Any, parts: Parts, queries: Queries, blocks: int) -> Scores:
        """As in `IndexKernel`."""
        scores: Scores = ops.bounds(
            queries.query.contiguous().flatten(2, 3),
            index.arrays["low"],
            index.arrays["high"],
            parts.frontier.committed,
            queries.positions,
            queries.spec.scaling,
            parts.rules.block,
            blocks,
            False,
        )
        return scores


class MinMaxIndex(Index):
    """Ranks a block by the largest logit that its bounds allow. 2 bits per key element at block 16.

    Source: Quest (arXiv 2406.10774), OasisKV (arXiv 2608.08097).
    """

    name = "minmax"
    kernels: ClassVar = {"triton": BoundsKernel()}

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        """Bounds of each block."""
        return {"low": keys.amin(-2), "high": keys.amax(-2)}

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        """Upper bound of the block's logits."""
        low, high = self.arrays["low"], self.arrays["high"]
        return self.ops.bound_logits(query, low[:, :, :-1], high[:, :, :-1])


class MinMax8Index(MinMaxIndex):
    """Min/max as 8-bit floats: half the memory and traffic, 1 bit per key element at block 16.

    Keys beyond +-448, which few models have, are ranked as if they were 448.
    """

    name = "minmax8"
    kernels: ClassVar = {"triton": BoundsKernel()}

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        """Bounds of each block, rounded outwards."""
        exact = super().encode(keys)
        return {name: self.ops.to_float8(x, name == "high") for name, x in exact.items()}
