"""Indexes of the keys: what stays in fast memory of every block, and how it ranks them."""

from typing import Any

import torch

from ..ops import kernels
from .base import Index
from .checks import check_class, check_group, check_index
from .kernel import IndexKernel
from .keys2bit import Keys2BitIndex
from .minmax import MinMax8Index, MinMaxIndex
from .pca import PrincipalKeysIndex
from .simple import MeanKeyIndex, OracleIndex, StreamingIndex

INDEXES: dict[str, type[Index]] = {
    cls.name: cls
    for cls in (
        Keys2BitIndex,
        MinMaxIndex,
        MinMax8Index,
        PrincipalKeysIndex,
        MeanKeyIndex,
        StreamingIndex,
        OracleIndex,
    )
}


def index_class(index: Any) -> type[Index]:
    """The class for a name or a class.

    Raises:
        TypeError: neither a known name nor a subclass of `Index`.
        OasisConfigError: a subclass that cannot be used.
    """
    if isinstance(index, str) and index in INDEXES:
        return INDEXES[index]
    if isinstance(index, type) and issubclass(index, Index):
        if not built_in(index):
            check_class(index, INDEXES)
        return index
    raise TypeError(
        f"index: got {index!r}, expected one of {sorted(INDEXES)} or a subclass of Index"
    )


def group_tokens(index: type[Index], block: int) -> int:
    """Tokens that an index encodes together.

    Raises:
        OasisConfigError: they are no multiple of the block.
    """
    return index.group_tokens(block) if built_in(index) else check_group(index, block)


def build_index(
    index: type[Index],
    block: int,
    budget_blocks: int,
    reduction: str,
    batch: int,
    example: torch.Tensor,
) -> Index:
    """An empty index for keys `[B, H, ..., D]` like `example`, of `batch` sequences.

    Raises:
        OasisConfigError: a class of one's own that breaks the contract of `Index`.
    """

    def make() -> Index:
        return index(block, budget_blocks, reduction, kernels("reference"))

    heads, built = example.shape[1], make()
    if not built_in(index):
        check_index(make, heads, example)
        built.watched = True
    built.allocate(batch, heads, example)
    return built


def built_in(index: type[Index]) -> bool:
    """Whether an index comes with this package."""
    return INDEXES.get(getattr(index, "name", "")) is index


__all__ = [
    "INDEXES",
    "Index",
    "IndexKernel",
    "Keys2BitIndex",
    "MeanKeyIndex",
    "MinMax8Index",
    "MinMaxIndex",
    "OracleIndex",
    "PrincipalKeysIndex",
    "StreamingIndex",
    "build_index",
    "built_in",
    "group_tokens",
    "index_class",
]
