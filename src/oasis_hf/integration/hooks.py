"""The hooks that a cache puts on its model: pieces of prompts, repair of re-fed tokens, undo.

Transformers ignores `prefill_chunk_size` under assisted decoding, and feeds the whole prompt again
to a cache that already holds part of it: under assisted decoding in every supported version, and
with `prefill_chunk_size` before 5.23. The hook sees both and sets them right. A forward that breaks
off (out of memory, a wrong mask, an interrupt) leaves some layers ahead of others: it is undone.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..facts.ambient import uncompiled
from ..facts.compat import cache_of, withholds_cache
from ..facts.handle import WITHHELD, OasisUnsupportedError, never_attended, take_pending
from ..facts.pieces import columns_of, given_rows, obstacles, piece_of
from ..layers.changes import Change, hide, shorten
from ..layers.forward import Kind
from ..layers.state import CacheState, Checkpoint
from .attention import check_width


class ForwardHook:
    """Two public torch hooks around the forward; they act only on calls that carry their cache."""

    # While an error is handled torch walks the model's own table of hooks, and a cache may be
    # collected at any moment of it: no hook leaves the table then.
    _late: ClassVar[list[ForwardHook]] = []

    def __init__(self, model: torch.nn.Module, cache: CacheState) -> None:
        self._remove_late()
        self._cache = weakref.ref(cache)
        self.feeds_pieces = False
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

    @property
    def active(self) -> bool:
        """Whether a forward that these hooks have seen is in progress."""
        return self.feeds_pieces or self._checkpoint is not None

    def notice(self, cache: CacheState, rows: int) -> None:
        """Warn of a prompt that reaches the cache past these hooks, and is not cut."""
        size = cache.oasis_config.prefill_chunk_size
        if not self.active and size is not None and rows > size:
            warnings.warn(
                f"prefill_chunk_size: got {rows} tokens by model.forward(...), past the model's "
                "hooks, so they are read at once; call model(...)",
                stacklevel=2,
            )

    @uncompiled
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
        cache.forget_gradients()
        if self.feeds_pieces:
            return
        cache.expect()
        if missed is not None or output is None:
            self._undo(cache)
        elif cache.turn is not None:
            cache.turn.done()
        self._checkpoint = None
        if missed is not None and output is not None:
            raise never_attended(missed)

    def _undo(self, cache: CacheState) -> None:
        """Undo the forward in progress, if it broke off."""
        if self._checkpoint is not None:
            cache.roll_back(self._checkpoint)
        self._checkpoint = None

    def settle(self, cache: CacheState) -> None:
        """Undo a forward that an interrupt broke off; between forwards, nothing is to be done."""
        if not self.feeds_pieces:
            self._undo(cache)

    def keep(self) -> None:
        """Do not undo the last forward any more; pieces of a prompt are one forward."""
        if not self.feeds_pieces:
            self._checkpoint = None

    def __reduce__(self) -> Any:
        """A copied or pickled model has no cache: its hooks do nothing."""
        return ForwardHook._idle, ()

    @classmethod
    def _idle(cls) -> ForwardHook:
        hook = cls.__new__(cls)
        vars(hook).update(_cache=lambda: None, feeds_pieces=False, _checkpoint=None, _handles=[])
        return hook

    @uncompiled
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
        if withholds_cache(model):
            raise OasisUnsupportedError(f"{type(model).__name__}: {WITHHELD}")
        if len(args) == 1 and isinstance(args[0], Tensor):
            kwargs = dict(kwargs, input_ids=args[0])
            args = ()
        if self.feeds_pieces:
            # Of a piece, however short, as of all of its prompt.
            self._announce(cache, kwargs, 0, kind=Kind.PROMPT)
            return None
        # An interrupt leaves a forward without the hook after it.
        self._undo(cache)
        cache.forward, self._checkpoint = None, cache.checkpoint()
        if args or given_rows(kwargs) is None:
            self._follow(cache, kwargs)
            return None
        kwargs = dict(kwargs)
        keep = kwargs.get("logits_to_keep", 0)
        keep = keep if isinstance(keep, int) else 0
        self._drop_cached(cache, kwargs, keep)
        self._follow(cache, kwargs)
        cut = self._feed_pieces(model, cache, kwargs, keep)
        if cut and not cache.drafts_announced:
            self._announce(cache, kwargs, keep, kind=Kind.PROMPT)
        else:
            self._announce(cache, kwargs, keep)
        return args, kwargs

    def _announce(self, cache: CacheState, kwargs: dict[str, Any], keep: int, **known: Any) -> None:
        """Tell the cache what the forward that begins now is; its mask has been looked at."""
        known |= {"ids": kwargs.get("input_ids"), "agreed": True}
        cache.forward = cache.describe(given_rows(kwargs) or 0, keep, **known)

    def _change(self, cache: CacheState, change: Change) -> None:
        """Take note of a change that is undone if the forward breaks off."""
        assert self._checkpoint is not None
        self._checkpoint.changes.append(change)
        self._checkpoint.columns = cache.ledger.columns

    def _follow(self, cache: CacheState, kwargs: dict[str, Any]) -> None:
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
            grown = cache.mask_agrees or (cache.turn is not None and cache.turn.read)
            if not grown and ledger.differs(held):
                self._change(cache, hide(cache, held))
        except ValueError:
            assert self._checkpoint is not None
            if not self._checkpoint.changes:
                # Nothing is to be undone.
                self._checkpoint = None
            raise

    def _drop_cached(self, cache: CacheState, kwargs: dict[str, Any], keep: int) -> None:
        """Remove leading tokens that the cache holds already.

        Only `generate` feeds tokens again, and it always says where they belong. A call by hand
        whose mask does not fit is a mistake.
        """
        past, rows = cache.get_seq_length(), given_rows(kwargs) or 0
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if not past or cache.turn is None or not isinstance(positions, Tensor):
            return
        start = past
        if isinstance(mask, Tensor) and mask.ndim == 2:
            start = mask.shape[1] - rows
        elif mask is None and cache.drafts_announced:
            start = int(positions[..., 0].max())
        if not 0 <= start < past:
            return
        # The rows whose logits are wanted are computed in any case.
        spare = rows - (keep or rows)
        if obstacles(kwargs, start):
            # Images, for example: which of them belong to the tokens left out is not known.
            spare = 0
        if past - start > spare:
            self._change(cache, shorten(cache, start + spare))
        again = min(past - start, spare)
        kwargs.update(columns_of(kwargs, again))

    def _feed_pieces(
        self, model: torch.nn.Module, cache: CacheState, kwargs: dict[str, Any], keep: int
    ) -> bool:
        """Run all of a long prompt but its last piece, which keeps the rows whose logits count.

        Returns:
            Whether there were several pieces.
        """
        size = cache.oasis_config.prefill_chunk_size
        total = given_rows(kwargs) or 0
        wants_all = any(name.startswith("output_") and value for name, value in kwargs.items())
        if size is None or not keep or wants_all or total <= max(size, keep):
            return False
        past, done = cache.get_seq_length(), 0
        whole = obstacles(kwargs, past)
        if whole:
            warnings.warn(
                f"prefill_chunk_size: got a prompt with {', '.join(whole)}, which cannot be cut "
                f"together with its tokens; all {total} of them are read at once",
                stacklevel=2,
            )
            return False
        self.feeds_pieces = True
        try:
            while total - done > max(size, keep):
                end = min(done + size, total - keep)
                model(**piece_of(kwargs, done, end, past))
                # A sliding layer that records its past keeps everything until a crop, and would
                # outgrow the mask of the next piece.
                if any(getattr(layer, "record_past", False) for layer in cache.layers):
                    cache.crop(0)
                done = end
        finally:
            self.feeds_pieces = False
        kwargs.update(columns_of(kwargs, done))
        return True
