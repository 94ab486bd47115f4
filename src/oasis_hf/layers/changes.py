"""Changes of what a cache holds, made before a forward, each of which can be undone.

A text may be given again with another continuation, and a mask may hide tokens that it showed
before. Both take tokens out of the cache. As the forward that follows may still fail, what was
taken is kept until it is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..facts.ambient import kept_steady
from ..facts.compat import fills_window, is_sliding
from ..facts.handle import OasisUnsupportedError
from .layer import OasisLayer
from .ledger import Record
from .state import CacheState, native_state


@dataclass
class Change:
    """One change, and all that its undoing needs.

    Attributes:
        record: the ledger before.
        kept: tokens of each sequence that stayed where they were.
        taken: for each offloaded layer, what was taken out after these, of each sequence.
        native: attributes of every other layer before.
    """

    record: Record
    kept: list[int]
    taken: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    native: dict[int, dict[str, Any]] = field(default_factory=dict)

    @kept_steady
    def undo(self, cache: CacheState) -> None:
        """Put everything back."""
        for number, attributes in self.native.items():
            vars(cache.layers[number]).update(attributes)
        for number, parts in self.taken.items():
            layer = cache.layers[number]
            layer.cut(self.kept, self.record.columns)
            layer.give(parts, self.record.columns)
        cache.ledger.restore(self.record)


def _holding(cache: CacheState) -> dict[int, OasisLayer]:
    return {
        number: layer
        for number, layer in enumerate(cache.layers)
        if isinstance(layer, OasisLayer) and layer.is_initialized
    }


@kept_steady
def shorten(cache: CacheState, columns: int) -> Change:
    """Keep the first columns only.

    Raises:
        OasisUnsupportedError: a sliding or recurrent layer cannot go back; nothing is changed.
    """
    layers, removed = _holding(cache), cache.ledger.columns - columns
    change = Change(cache.ledger.record(), [], native=native_state(cache))
    try:
        for number in change.native:
            layer = cache.layers[number]
            layer.crop(-removed)
            if is_sliding(layer) and not fills_window(layer):
                raise RuntimeError("the window has forgotten what lies before it")
    except (RuntimeError, ValueError, NotImplementedError) as error:
        change.undo(cache)
        raise OasisUnsupportedError(
            f"the text differs from what the cache holds: {removed} tokens would have to be taken "
            "back, and this model's sliding or recurrent layers cannot go back; call cache.reset() "
            "and read it anew, or pre-fill less than the whole prompt, and cut prompts with "
            "OasisCache(model, prefill_chunk_size=...) rather than generate(prefill_chunk_size=...)"
        ) from error
    cache.ledger.remove(removed)
    real = cache.ledger.real()
    batch = next(iter(layers.values())).batch_size if layers else 0
    change.kept = [columns] * batch if real is None else real.sum(1).tolist()
    for number, layer in layers.items():
        change.taken[number] = layer.cut(change.kept, columns)
    return change


@kept_steady
def hide(cache: CacheState, mask: Tensor) -> Change:
    """Take out the tokens of columns that a mask `[B, columns]` bool leaves out.

    Tokens before the first of them stay where they are. Of those after it the ones that the mask
    leaves in are stored anew, as tokens of a sequence that never had the others.

    Raises:
        ValueError: the mask shows columns that were padding; nothing is changed.
    """
    before = cache.ledger.real()
    if before is None:
        before = torch.ones_like(mask)
    mask = mask.to(before.device)
    shown = mask & ~before
    if bool(shown.any()):
        row, column = shown.nonzero()[0].tolist()
        raise ValueError(
            f"attention_mask: got 1 for column {column} of sequence {row}, expected 0: it was "
            "padding, or hidden by an earlier mask, and the cache does not hold it; pass a mask "
            "that says of earlier columns what it said before, or call cache.reset() and read the "
            "text anew"
        )
    change = Change(cache.ledger.record(), [], native=native_state(cache))
    hidden = before & ~mask
    columns = mask.shape[1]
    first = torch.where(hidden.any(1), hidden.int().argmax(1), columns)
    number = torch.arange(columns, device=mask.device)
    change.kept = (before & (number < first[:, None])).sum(1).tolist()
    stays = [
        mask[row, start:][before[row, start:]].cpu() for row, start in enumerate(first.tolist())
    ]
    for place, layer in _holding(cache).items():
        taken = change.taken[place] = layer.cut(change.kept, columns)
        stay = [(k[:, :, keep], v[:, :, keep]) for (k, v), keep in zip(taken, stays, strict=True)]
        layer.give(stay, columns)
    cache.ledger.hide(mask)
    return change
