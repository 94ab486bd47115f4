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
        if name == "attention_mask":
            fits = isinstance(value, Tensor) and value.shape[1:] == (past + rows,)
        else:
            fits = name in BY_COLUMN and value.shape[BY_COLUMN[name]] == rows
        if not fits:
            found.append(name)
    return found


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, Tensor):
        return True
    elif isinstance(value, str) or not isinstance(value, Iterable):
        return False
    return any(_holds_tensors(part) for part in value)


def columns_of(kwargs: Mapping[str, Any], first: int, last: int | None = None) -> dict[str, Any]:
    """A call's arguments with new columns `first` to `last` alone; its mask is left as it is."""
    cut = dict(kwargs)
    for name, axis in BY_COLUMN.items():
        value = kwargs.get(name)
        if isinstance(value, Tensor):
            axis %= value.ndim
            end = value.shape[axis] if last is None else last
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
    piece = columns_of(kwargs, first, last)
    piece["logits_to_keep"] = 1
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor):
        piece["attention_mask"] = mask[:, : past + last]
    return piece
