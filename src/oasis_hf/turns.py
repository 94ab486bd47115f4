"""One call of `generate` over a cache: what its text and the cache have in common.

`generate` is given the whole text and feeds what the cache does not hold, by length alone. Where
the text was rewritten at a place that is held already (a chat template that drops earlier
reasoning, a prompt asked again), the answer would be that of the old text. So the ids that the
cache was fed are compared with the text's, and what differs is taken back and read again.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .changes import Change, shorten
from .compat import cache_of
from .copying import as_original

if TYPE_CHECKING:
    from .cache import OasisCache


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


def align(cache: OasisCache, ids: Tensor | None, mask: Tensor | None) -> Change | None:
    """Take back what the cache holds beyond its common beginning with a text.

    Args:
        cache: the cache.
        ids: `[B, L]` a text; compared if it is the whole one.
        mask: `[B, C]`, or None for ones over `ids`. Where C is not L, ids are new tokens alone.

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
    if differs and 2 * same < length:
        raise ValueError(
            f"input_ids: got a text of {length} tokens, of which the cache holds the first {same}, "
            f"expected more of the {past} that it was given; pass the whole text, or its new "
            "tokens alone with an attention_mask over all columns; for another text call "
            "cache.reset() first"
        )
    # The logits of the last token are wanted in any case.
    keep = min(same, length - 1)
    change = shorten(cache, keep) if keep < past else None
    if differs:
        warnings.warn(
            f"input_ids: the text differs from what the cache holds from token {same} on; the "
            f"{past - same} tokens from there are taken back, and the text is read again",
            stacklevel=5,
        )
    return change


@contextmanager
def turn(cache: OasisCache, ids: Tensor | None, mask: Tensor | None) -> Iterator[None]:
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


class Generate:
    """Stands in front of one model's `generate`; keeps its signature.

    However many caches a model serves, there is one of these; it goes with the last of them.
    """

    def __init__(self, model: Any) -> None:
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._was_instance = "generate" in vars(model)
        self._original: Any = model.generate
        self._caches: weakref.WeakSet[OasisCache] = weakref.WeakSet()
        self.__signature__ = inspect.signature(self._original)
        self.__doc__ = self._original.__doc__

    @classmethod
    def add(cls, model: Any, cache: OasisCache) -> None:
        """Watch over the turns of `cache` too."""
        if not callable(getattr(model, "generate", None)):
            return
        own = vars(model).get("generate")
        if not isinstance(own, cls):
            own = model.generate = cls(model)
        own._caches.add(cache)
        weakref.finalize(cache, own._remove_if_idle)

    def _remove_if_idle(self) -> None:
        model = self._model()
        # A weak set still counts what is about to leave it.
        served = any(True for _ in self._caches)
        if model is None or served or vars(model).get("generate") is not self:
            return
        if self._was_instance:
            model.generate = self._original
        else:
            del model.generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = cache_of(kwargs)
        if not any(cache is one for one in self._caches):
            return self._original(*args, **kwargs)
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if kwargs.get("inputs_embeds") is not None:
            ids = None
        with turn(cache, ids, kwargs.get("attention_mask")):
            return self._original(*args, **kwargs)

    def __reduce__(self) -> Any:
        """A copied or pickled model has no cache: it generates by its own method."""
        return as_original(self._original)
