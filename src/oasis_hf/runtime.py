"""The hooks that a cache puts on its model: pieces of prompts, repair of re-fed tokens, undo.

Transformers ignores `prefill_chunk_size` under assisted decoding, and feeds the whole prompt again
to a cache that already holds part of it: under assisted decoding in every supported version, and
with `prefill_chunk_size` before 5.23. The hook sees both and sets them right. A forward that breaks
off (out of memory, a wrong mask, an interrupt) leaves some layers ahead of others: it is undone.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .attention import check_width
from .changes import Change, hide, shorten
from .compat import cache_of
from .handle import never_attended, take_pending

if TYPE_CHECKING:
    from .cache import Checkpoint, OasisCache


class ForwardHook:
    """Two public torch hooks around the forward; they act only on calls that carry their cache."""

    # While an error is handled torch walks the model's own table of hooks, and a cache may be
    # collected at any moment of it: no hook leaves the table then.
    _late: ClassVar[list[ForwardHook]] = []

    def __init__(self, model: torch.nn.Module, cache: OasisCache) -> None:
        self._remove_late()
        self._cache = weakref.ref(cache)
        self._inside = False
        self._checkpoint: Checkpoint | None = None
        self._handles = [
            model.register_forward_pre_hook(self, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the model, or have that done before the next forward."""
        if sys.exception() is not None:
            self._late.append(self)
            return
        for handle in self._handles:
            handle.remove()

    @classmethod
    def _remove_late(cls) -> None:
        """Remove the hooks of caches that died while an error was handled."""
        while cls._late and sys.exception() is None:
            cls._late.pop().remove()

    def _after(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        output: Any = None,
    ) -> None:
        """Notice a last update whose attention never ran; after an error there is no output."""
        cache = self._cache()
        if cache is None or kwargs is None or cache_of(kwargs) is not cache:
            return
        missed = take_pending()
        if self._inside:
            return
        if missed is not None or output is None:
            self._undo(cache)
        elif cache.turn is not None:
            cache.turn.done()
        self._checkpoint = None
        cache.ledger.incoming = None
        if missed is not None and output is not None:
            raise never_attended(missed)

    def _undo(self, cache: OasisCache) -> None:
        """Undo the forward in progress, if it broke off."""
        if self._checkpoint is not None:
            cache.roll_back(self._checkpoint)
        self._checkpoint = None

    def settle(self, cache: OasisCache) -> None:
        """Undo a forward that an interrupt broke off; between forwards, nothing is to be done."""
        if not self._inside:
            self._undo(cache)

    def __reduce__(self) -> Any:
        """A copied or pickled model has no cache: its hooks do nothing."""
        return ForwardHook._idle, ()

    @classmethod
    def _idle(cls) -> ForwardHook:
        hook = cls.__new__(cls)
        vars(hook).update(_cache=lambda: None, _inside=False, _checkpoint=None, _handles=[])
        return hook

    def __call__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Adjust one forward call of `model`.

        Of a hook that is removed while others run, torch forgets that it takes `kwargs`.
        """
        self._remove_late()
        cache = self._cache()
        if cache is None or kwargs is None or cache_of(kwargs) is not cache:
            return None
        take_pending()
        if len(args) == 1 and isinstance(args[0], Tensor):
            kwargs = dict(kwargs, input_ids=args[0])
            args = ()
        if self._inside:
            cache.ledger.incoming = kwargs.get("input_ids")
            cache.ledger.agree()
            return None
        # An interrupt leaves a forward without the hook after it.
        self._undo(cache)
        cache.ledger.incoming = None
        self._checkpoint = cache.checkpoint()
        if args or not isinstance(kwargs.get("input_ids"), Tensor):
            self._agree(cache, kwargs)
            return None
        kwargs = dict(kwargs)
        first_round = cache.first_round
        keep = kwargs.get("logits_to_keep", 0)
        keep = keep if isinstance(keep, int) else 0
        self._drop_cached(cache, kwargs, keep)
        self._agree(cache, kwargs)
        if kwargs["input_ids"].shape[1] > 1 and keep == 1:
            cache.prompt_expected = True
        self._feed_pieces(model, cache, kwargs, keep)
        cache.first_round = first_round
        cache.prompt_drafts = max(keep - 1, 0) if first_round else 0
        cache.ledger.incoming = kwargs["input_ids"]
        return args, kwargs

    def _change(self, cache: OasisCache, change: Change) -> None:
        """Take note of a change that is undone if the forward breaks off."""
        assert self._checkpoint is not None
        self._checkpoint.changes.append(change)
        self._checkpoint.columns = cache.ledger.columns

    def _agree(self, cache: OasisCache, kwargs: dict[str, Any]) -> None:
        """Check what the mask says of columns that are held, and follow it.

        Within one call of `generate` masks only grow, so only the first one is looked at: that
        waits for the device.

        Raises:
            ValueError: the mask does not fit the cache; nothing is changed.
        """
        mask, ledger = kwargs.get("attention_mask"), cache.ledger
        past = ledger.columns
        given = kwargs.get("input_ids")
        if not isinstance(given, Tensor):
            given = kwargs.get("inputs_embeds")
        if not past or not isinstance(mask, Tensor) or mask.ndim != 2 or given is None:
            return
        try:
            check_width(mask, past, given.shape[1])
            held = mask[:, :past].bool()
            grown = ledger.agreed == past or (cache.turn is not None and cache.turn.read)
            if not grown and ledger.differs(held):
                self._change(cache, hide(cache, held))
        except ValueError:
            assert self._checkpoint is not None
            if not self._checkpoint.changes:
                # Nothing is to be undone.
                self._checkpoint = None
            raise
        ledger.agree()

    def _drop_cached(self, cache: OasisCache, kwargs: dict[str, Any], keep: int) -> None:
        """Remove leading tokens that the cache holds already.

        Only `generate` feeds tokens again, and it always says where they belong. A call by hand
        whose mask does not fit is a mistake.
        """
        past, rows = cache.get_seq_length(), kwargs["input_ids"].shape[1]
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if not past or cache.turn is None or not isinstance(positions, Tensor):
            return
        start = past
        if isinstance(mask, Tensor) and mask.ndim == 2:
            start = mask.shape[1] - rows
        elif mask is None and cache.first_round:
            start = int(positions[..., 0].max())
        if not 0 <= start < past:
            return
        # The rows whose logits are wanted are computed in any case.
        spare = rows - (keep or rows)
        if past - start > spare:
            self._change(cache, shorten(cache, start + spare))
        again = min(past - start, spare)
        kwargs["input_ids"] = kwargs["input_ids"][:, again:]
        kwargs["position_ids"] = positions[..., again:]

    def _feed_pieces(
        self, model: torch.nn.Module, cache: OasisCache, kwargs: dict[str, Any], keep: int
    ) -> None:
        """Run all of a long prompt but its last piece, which keeps the rows whose logits count."""
        size = cache.oasis_config.prefill_chunk_size
        ids, positions = kwargs["input_ids"], kwargs.get("position_ids")
        wants_all = kwargs.get("output_hidden_states") or kwargs.get("output_attentions")
        if size is None or not keep or wants_all or ids.shape[1] <= size:
            return
        mask, done, total = kwargs.get("attention_mask"), 0, ids.shape[1]
        past = cache.get_seq_length()
        self._inside = True
        try:
            while total - done > max(size, keep):
                end = min(done + size, total - keep)
                piece = dict(kwargs, input_ids=ids[:, done:end], logits_to_keep=1)
                if isinstance(positions, Tensor):
                    piece["position_ids"] = positions[..., done:end]
                if isinstance(mask, Tensor):
                    piece["attention_mask"] = mask[:, : past + end]
                cache.prompt_expected = True
                model(**piece)
                # A sliding layer that records its past keeps everything until a crop, and would
                # outgrow the mask of the next piece.
                if any(getattr(layer, "record_past", False) for layer in cache.layers):
                    cache.crop(0)
                done = end
        finally:
            self._inside = False
        kwargs["input_ids"] = ids[:, done:]
        if isinstance(positions, Tensor):
            kwargs["position_ids"] = positions[..., done:]
        cache.prompt_expected = True
