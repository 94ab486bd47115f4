"""All keys at two bits, behind their own coarse bounds: 3 bits per key element."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..geometry import ceil_div
from ..ops import Parts, Queries, Scores
from .base import Index
from .kernel import IndexKernel

GROUP_TOKENS = 32
LEAST_CANDIDATES = 8192


def candidate_tokens(budget: int) -> int:
    """Tokens whose groups are refined at two bits, for a budget of tokens.

    Four times the budget, but never few: the coarse bounds of a group keep the attention mass,
    and still lose single tokens that matter, such as a needle. Refining 8K of them is cheap.
    """
    return max(4 * budget, LEAST_CANDIDATES)


class Keys2BitKernel(IndexKernel):
    """Bounds of all groups, the candidates among these, and their keys at two bits."""

    form = "keys2bit"

    def scan(self, ops: Any, index: Any, parts: Parts, queries: Queries, blocks: int) -> Scores:
        """As in `IndexKernel`."""
        rules, committed, arrays = parts.rules, parts.frontier.committed, index.arrays
        query, positions = queries.query.contiguous().flatten(2, 3), queries.positions
        groups = blocks * rules.block // rules.group
        coarse = ops.bounds(
            query,
            arrays["lowest"],
            arrays["step"],
            committed,
            positions,
            queries.spec.scaling,
            rules.group,
            groups,
            True,
        )
        wanted = ceil_div(candidate_tokens(index.budget_blocks * index.block), rules.group)
        heads = query.shape[1]
        chosen = ops.candidates(coarse, committed, min(wanted, groups), heads, rules.group)
        scores: Scores = ops.keys2bit(
            query,
            arrays["codes"],
            arrays["lowest"],
            arrays["step"],
            chosen,
            committed,
            parts.tail.k,
            parts.frontier.lengths,
            positions,
            queries.spec.scaling,
            rules.block,
        )
        return scores


class Keys2BitIndex(Index):
    """Estimates each block's attention from two-bit keys.

    Quantised per channel over 32 tokens. The stored lowest value and step also bound the group's
    keys, which gives a coarse level for free: the groups with the largest bounds are candidates,
    and only these are refined. Kin: the low-bit key copies of SpeCache and Twilight.
    """

    name = "keys2bit"
    estimates_mass = True
    coarse = ("lowest", "step")
    kernels: ClassVar = {"triton": Keys2BitKernel()}

    @classmethod
    def group_tokens(cls, block: int) -> int:
        """32 tokens, or the block where that is larger."""
        return max(GROUP_TOKENS, block)

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        """Codes, lowest value and step of each group."""
        if keys.shape[-1] % 4:
            raise ValueError(
                f"index 'keys2bit': got head dimension {keys.shape[-1]}, expected a multiple of 4; "
                "use index='minmax'"
            )
        codes, lowest, step = self.ops.quantize_keys_2bit(keys)
        return {"codes": codes, "lowest": lowest, "step": step}

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        """Log of the block's summed attention under two-bit keys; -inf for non-candidates."""
        arrays = [self.arrays[name] for name in ("codes", "lowest", "step")]
        tokens = arrays[0].shape[3]
        per_group = tokens // self.block
        groups = max(1, ceil_div(self.ops.last_live(live), per_group))
        wanted = ceil_div(candidate_tokens(self.budget_blocks * self.block), tokens)
        if wanted >= groups:
            fine = self._blocks(query, *(array[:, :, :groups] for array in arrays))
            return self._padded(fine, live)
        lowest, step = (array[:, :, :groups] for array in arrays[1:])
        known = live[:, :, : groups * per_group : per_group]
        chosen = self._candidates(query, lowest, step, known, wanted)
        parts = [
            self.ops.gather_blocks(array.flatten(3), chosen).unflatten(3, array.shape[3:])
            for array in arrays
        ]
        fine = self._blocks(query, *parts)
        offset = torch.arange(per_group, device=query.device)
        target = (chosen[..., None] * per_group + offset).flatten(2)[:, :, None].expand_as(fine)
        everything = fine.new_full((*fine.shape[:3], live.shape[-1]), float("-inf"))
        return everything.scatter(3, target, fine)

    def _candidates(
        self, query: Tensor, lowest: Tensor, step: Tensor, live: Tensor, count: int
    ) -> Tensor:
        """Live groups with the largest bounds, `[B, H, count]`."""
        low = lowest.float()
        bound = self.ops.bound_logits(query, low, low + 3 * step.float())
        score = self.ops.reduce_rows(bound, live, None, "mean")
        return self.ops.select_blocks(score, count)[0]

    def _blocks(self, query: Tensor, codes: Tensor, lowest: Tensor, step: Tensor) -> Tensor:
        """Log-sum of exp over each block: codes `[B, H, n, g, D/4]` to `[B, H, Q, blocks]`."""
        keys = self.ops.dequantize_keys_2bit(codes, lowest, step)
        logits = query @ keys.flatten(2, 3).transpose(-1, -2)
        return torch.logsumexp(logits.unflatten(-1, (-1, self.block)), -1)

    def _padded(self, logits: Tensor, live: Tensor) -> Tensor:
        """Logits of the first blocks, and -inf for the others of `[B, 1, N]`."""
        missing = live.shape[-1] - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
