"""Which arguments of a forward belong to its columns, and how a call is cut by columns.

A long prompt is read in pieces, and tokens that a cache holds already are left out of a call. Both
cut the arguments that have an entry for every column. What belongs to columns without saying to
which (images, sounds, labels, packed lengths) cannot be cut: such a call stays whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from .compat import CACHE_KWARGS

BY_COLUMN = {
    "input_ids": 1,
    "inputs_embeds": 1,
    # `[B, T]`, or `[n, B, T]` where positions have several dimensions.
    "position_ids": -1,
    "cache_position": -1,
    "token_type_ids": 1,
    "mm_token_type_ids": 1,
}
"""Arguments with an entry for every new column, and the axis of it."""

OVER_ALL = ("attention_mask", "token_type_ids", "mm_token_type_ids")
"""Arguments that may be `[B, C]` over the columns held too, these first."""

OF_LAST = ("logits_to_keep",)
"""Arguments that say which of the newest columns are wanted."""


def given_rows(kwargs: Mapping[str, Any]) -> int | None:
    """New columns of a call, by its ids or embeddings; None if it has neither."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(kwargs.get(name), Tensor):
            return int(kwargs[name].shape[1])
    return None


def obstacles(kwargs: Mapping[str, Any], past: int) -> list[str]:
    """Names of the arguments that keep a call from being cut.

    Args:
        kwargs: the call's.
        past: columns that the cache holds.
    """
    rows = given_rows(kwargs)
    assert rows is not None
    found = []
    for name, value in kwargs.items():
        if name in (*CACHE_KWARGS, *OF_LAST) or not _holds_tensors(value):
            continue
        one_for_each = name in BY_COLUMN and _extent(value, name) == rows
        if not one_for_each and not _covers(name, value, past + rows):
            found.append(name)
    return found


def _extent(value: Any, name: str) -> int | None:
    """Entries of an argument along its axis of columns."""
    axis = BY_COLUMN[name]
    if not isinstance(value, Tensor) or not -value.ndim <= axis < value.ndim:
        return None
    return int(value.shape[axis])


def _covers(name: str, value: Any, columns: int) -> bool:
    """Whether an argument has an entry for each of all columns, those held included."""
    return name in OVER_ALL and isinstance(value, Tensor) and value.shape[1:] == (columns,)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, Tensor):
        return True
    elif isinstance(value, str) or not isinstance(value, Iterable):
        return False
    return any(_holds_tensors(part) for part in value)


def columns_of(kwargs: Mapping[str, Any], first: int, last: int | None = None) -> dict[str, Any]:
    """A call's arguments with new columns `first` to `last` alone.

    Those that cover all columns are left as they are.
    """
    cut, rows = dict(kwargs), given_rows(kwargs) or 0
    for name, axis in BY_COLUMN.items():
        value = kwargs.get(name)
        if value is not None and _extent(value, name) == rows:
            end = rows if last is None else last
            cut[name] = value.narrow(axis, first, end - first)
    return cut


def piece_of(kwargs: Mapping[str, Any], first: int, last: int, past: int) -> dict[str, Any]:
    """A call for new columns `first` to `last` alone, which wants the logits of the last one.

    Args:
        kwargs: the call's.
        first: first column of the piece.
        last: the column after it.
        past: columns that the cache held before the call.
    """
    piece, columns = columns_of(kwargs, first, last), past + (given_rows(kwargs) or 0)
    piece["logits_to_keep"] = 1
    for name in OVER_ALL:
        # Of an empty cache these are the new columns, cut above.
        if _covers(name, piece.get(name), columns):
            piece[name] = piece[name][:, : past + last]
    return piece
