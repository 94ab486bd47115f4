"""Indexes of the keys: what stays in fast memory of every block, and how it ranks them."""

from typing import Any

from .base import Index
from .keys2bit import Keys2BitIndex
from .minmax import MinMax8Index, MinMaxIndex
from .simple import MeanKeyIndex, OracleIndex, StreamingIndex

INDEXES: dict[str, type[Index]] = {
    cls.name: cls
    for cls in (
        Keys2BitIndex,
        MinMaxIndex,
        MinMax8Index,
        MeanKeyIndex,
        StreamingIndex,
        OracleIndex,
    )
}


def index_class(index: Any) -> type[Index]:
    """The class for a name or a class.

    Raises:
        TypeError: neither a known name nor a subclass of `Index`.
    """
    if isinstance(index, str) and index in INDEXES:
        return INDEXES[index]
    if isinstance(index, type) and issubclass(index, Index):
        return index
    raise TypeError(
        f"index: got {index!r}, expected one of {sorted(INDEXES)} or a subclass of Index"
    )


__all__ = [
    "INDEXES",
    "Index",
    "Keys2BitIndex",
    "MeanKeyIndex",
    "MinMax8Index",
    "MinMaxIndex",
    "OracleIndex",
    "StreamingIndex",
    "index_class",
]
