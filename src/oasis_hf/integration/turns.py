"""One call of `generate` over a cache: what its text and the cache have in common.

`generate` is given the whole text and feeds what the cache does not hold, by length alone. Where
the text was rewritten at a place that is held already (a chat template that drops earlier
reasoning, a prompt asked again), the answer would be that of the old text. So the ids that the
cache was fed are compared with the text's, and what differs is taken back and read again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..facts.compat import cache_of
from ..layers.changes import Change, shorten
from ..layers.state import CacheState
from .stand_in import StandIn


class Turn:
    """What is known of the call of `generate` in progress.

    Attributes:
        read: whether a forward of it has run: masks only grow from then on.
        change: what was taken out of the cache for it, until then.
    """

    def __init__(self, change: Change | None = None) -> None:
        self.read, self.change = False, change

    def done(self) -> None:
        """A forward has run."""
        self.read, self.change = True, None


def align(
    cache: CacheState, ids: Tensor | None, mask: Tensor | None, *, expected: bool = False
) -> Change | None:
    """Take back what the cache holds beyond its common beginning with a text.

    Args:
        cache: the cache.
        ids: `[B, L]` a text; compared if it is the whole one.
        mask: `[B, C]`, or None for ones over `ids`. Where C is not L, ids are new tokens alone.
        expected: whether the caller knows that the text may differ: that is neither refused nor
            warned of.

    Returns:
        What was changed, or None if nothing had to be.

    Raises:
        ValueError: most of the text is not what the cache holds; nothing is changed.
        OasisUnsupportedError: a sliding or recurrent layer cannot go back; nothing is changed.
    """
    past = cache.ledger.columns
    if not past or not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    length = ids.shape[1]
    if isinstance(mask, Tensor) and (mask.ndim != 2 or mask.shape[1] != length):
        return None
    same = cache.ledger.common(ids)
    differs = same < min(past, length)
    if differs and not expected and 2 * same < length:
        raise ValueError(
            f"input_ids: got a text of {length} tokens, of which the cache holds the first {same}, "
            f"expected more of the {past} that it was given; pass the whole text, or its new "
            "tokens alone with an attention_mask over all columns; for another text call "
            "cache.reset() first"
        )
    # The logits of the last token are wanted in any case.
    keep = min(same, length - 1)
    change = shorten(cache, keep) if keep < past else None
    if differs and not expected:
        warnings.warn(
            f"input_ids: the text differs from what the cache holds from token {same} on; the "
            f"{past - same} tokens from there are taken back, and the text is read again",
            stacklevel=5,
        )
    return change


@contextmanager
def turn(cache: CacheState, ids: Tensor | None, mask: Tensor | None) -> Iterator[None]:
    """One call of `generate`: the cache is as before if it fails before a forward has run."""
    if cache.turn is not None:
        yield
        return
    cache.turn = Turn(align(cache, ids, mask))
    try:
        yield
    except BaseException:
        if cache.turn.change is not None:
            cache.turn.change.undo(cache)
        raise
    finally:
        cache.turn = None


class Generate(StandIn):
    """Stands in front of one model's `generate`."""

    method = "generate"

    @classmethod
    def add(cls, model: Any, cache: CacheState) -> None:
        """Watch over the turns of `cache` too."""
        if callable(getattr(model, cls.method, None)):
            cls.in_front_of(model).serve(cache, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `generate`."""
        cache = cache_of(kwargs)
        if not any(cache is one for one in self.served):
            return self._original(*args, **kwargs)
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if kwargs.get("inputs_embeds") is not None:
            ids = None
        with turn(cache, ids, kwargs.get("attention_mask")):
            return self._original(*args, **kwargs)
