"""Batch operations of a whole cache: rows are repeated, chosen or moved in every part, or in none.

What can fail comes first: the row numbers are checked, then the memory for all layers together (old
and new slabs exist at the same time), then everything new is made. Only then is anything replaced.
A batch that does not grow needs no new host memory: its rows move within what is there, through a
scratch of one slab; and where a smaller batch would rather have smaller slabs and cannot get them,
it keeps the large ones. What other caches hold too stays as it is, and is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..storage import HostMemoryError, limits
from ..storage.limits import require
from ..storage.parts import LayerParts
from .ledger import PaddingLedger

Replacement = dict[int, Tensor]
"""New tensors by the `id` of those that they replace."""


class Rowwise(Protocol):
    """A layer that holds a batch."""

    @property
    def parts(self) -> LayerParts: ...
    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor that has a row per sequence by what `fn` makes of it."""


def repeated(batch: int, repeats: int) -> Tensor:
    """Row numbers where every row becomes `repeats` rows."""
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats: got {repeats!r}, expected a whole number of at least 1")
    return torch.arange(batch).repeat_interleave(repeats)


def chosen(batch: int, indices: Any, name: str) -> Tensor:
    """Row numbers `[B']` on the CPU.

    Args:
        batch: rows there are.
        indices: numbers, of which negative ones count from the end, or a bool mask.
        name: of the argument, for messages.

    Raises:
        ValueError: they do not fit a batch of `batch` rows.
    """
    given = torch.as_tensor(indices).cpu()
    if given.dtype == torch.bool:
        if tuple(given.shape) != (batch,):
            raise ValueError(
                f"{name}: got a mask of shape {tuple(given.shape)}, expected ({batch},), one flag "
                "for each sequence of the cache"
            )
        given = given.nonzero()[:, 0]
    if not given.numel():
        raise ValueError(
            f"{name}: got no rows, expected at least one; cache.reset() empties a cache"
        )
    whole = not (given.is_floating_point() or given.is_complex())
    if given.ndim != 1 or not whole or bool(((given < -batch) | (given >= batch)).any()):
        raise ValueError(
            f"{name}: got {given.tolist()}, expected a list of row numbers below {batch}, the "
            "batch that this cache holds"
        )
    return given.long() % batch


def take(layers: Sequence[Rowwise], rows: Tensor, others: Callable[[], None]) -> None:
    """Give all layers the rows `[B']` of their batch, or leave all as they are.

    Args:
        layers: the offloaded layers that hold anything.
        rows: numbers of present rows, on the CPU.
        others: does the same to everything else; where it raises, it has changed nothing.

    Raises:
        HostMemoryError: the larger batch does not fit.
    """
    if not layers:
        others()
        return
    before, after = layers[0].parts.batch_size, len(rows)
    if torch.equal(rows, torch.arange(before)):
        others()
        return
    if after > before or any(layer.parts.store.shared for layer in layers):
        _require(layers, before, after)
        found = [_made(layer, rows) for layer in layers]
        others()
        for layer, made in zip(layers, found, strict=True):
            _put(layer, made)
        return
    scratch = _Scratch(layers, after)
    others()
    for layer in layers:
        try:
            smaller = _made(layer, rows) if after < before else None
        except (RuntimeError, MemoryError):
            smaller = None
        if smaller is None:
            layer.map_batch(lambda held: scratch.moved(held, rows))
        else:
            _put(layer, smaller)


def _require(layers: Sequence[Rowwise], before: int, after: int) -> None:
    """Check the host memory for the new slabs of all layers, and all else that is on the host."""
    needed = 0
    for layer in layers:
        slabs = {id(slab) for slab in layer.parts.store.slabs}
        for held in layer.parts.rowwise():
            if held.device.type == "cpu":
                size = held.nbytes // max(1, before) * after
                needed += layer.parts.store.taken(size) if id(held) in slabs else size
    require(
        needed,
        limits.available_bytes(),
        f"{after} sequences instead of {before} x {len(layers)} layers, while the old ones are "
        "still there",
        "use fewer rows, a shorter context or a machine with more memory; nothing has changed",
    )


def _made(layer: Rowwise, rows: Tensor) -> Replacement:
    """New tensors of a layer for these rows; the layer itself does not change."""
    slabs, made = {id(slab) for slab in layer.parts.store.slabs}, {}
    # What the device still writes to the host, or to the pool on the side stream.
    layer.parts.join()
    layer.parts.store.settle()
    for held in layer.parts.rowwise():
        where = rows.to(held.device)
        if id(held) in slabs:
            fresh = layer.parts.store.like(held, len(rows))
            made[id(held)] = torch.index_select(held, 0, where, out=fresh)
        else:
            made[id(held)] = held.index_select(0, where)
    return made


def _put(layer: Rowwise, made: Replacement) -> None:
    layer.map_batch(lambda held: made[id(held)])


class _Scratch:
    """Room for the rows of any one tensor, taken before anything moves; one for each device."""

    def __init__(self, layers: Sequence[Rowwise], rows: int) -> None:
        sizes: dict[torch.device, int] = {}
        for layer in layers:
            for held in layer.parts.rowwise():
                size = held[:1].nbytes * rows
                sizes[held.device] = max(sizes.get(held.device, 0), size)
        try:
            self._room = {
                device: torch.empty(size, dtype=torch.uint8, device=device)
                for device, size in sizes.items()
            }
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise HostMemoryError(
                f"host memory: a scratch of {max(sizes.values()) / 1e9:.2f} GB to move rows in "
                f"could not be had ({error}); nothing has changed"
            ) from error

    def moved(self, held: Tensor, rows: Tensor) -> Tensor:
        """The rows of a tensor, in the first places of its own memory."""
        kept = held[: len(rows)]
        room = self._room[held.device][: kept.nbytes].view(held.dtype).view(kept.shape)
        torch.index_select(held, 0, rows.to(held.device), out=room)
        kept.copy_(room)
        return kept


def take_all(
    ours: Sequence[Rowwise],
    others: Sequence[Any],
    ledger: PaddingLedger,
    rows: Tensor,
    native: Callable[[Any], None],
) -> None:
    """Give a whole cache the rows `[B']` of its batch, or leave it as it is.

    Args:
        ours: the offloaded layers that hold anything.
        others: all other layers.
        ledger: of the cache.
        rows: numbers of present rows, on the CPU.
        native: does the same to one of the other layers.
    """

    def rest() -> None:
        parts = [*others, ledger]
        before = [_copied(part) for part in parts]
        try:
            for layer in others:
                native(layer)
            ledger.map_batch(lambda t: t.index_select(0, rows.to(t.device)))
        except BaseException:
            for part, state in zip(parts, before, strict=True):
                vars(part).clear()
                vars(part).update(state)
            raise

    take(ours, rows, rest)


def _copied(part: Any) -> dict[str, Any]:
    """Attributes of the ledger or one of Transformers' layers: batch operations replace tensors."""
    return {
        name: value.copy() if isinstance(value, list | dict) else value
        for name, value in vars(part).items()
    }
