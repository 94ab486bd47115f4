"""What a cache holds, and the life of a forward in it: begun, attended to, ended or undone."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig

from ..config import OasisConfig
from ..facts import compat
from ..facts.adapters import adapter_state
from ..facts.ambient import kept_steady
from ..facts.handle import OasisUnsupportedError
from .dense_layer import DenseLayer
from .forward import Drafting, Forward, Hint, describe
from .layer import OasisLayer
from .ledger import PaddingLedger


class Undoable(Protocol):
    """A change of a cache that was made for a forward."""

    def undo(self, cache: Any) -> None:
        """Put everything back."""


class Hook(Protocol):
    """What a cache's hook on its model tells of the forward in progress."""

    feeds_pieces: bool

    @property
    def active(self) -> bool:
        """Whether a forward that the hook has seen is in progress."""

    def notice(self, cache: Any, rows: int) -> None:
        """Warn of a prompt that reaches the cache past the hook."""

    def settle(self, cache: Any) -> None:
        """Undo a forward that an interrupt broke off."""

    def keep(self) -> None:
        """Do not undo the last forward any more."""


class Turn(Protocol):
    """The call of `generate` in progress."""

    @property
    def read(self) -> bool:
        """Whether its first forward has ended."""

    def done(self) -> None:
        """Note the end of a forward."""


@dataclass
class Checkpoint:
    """Where to return to if a forward breaks off.

    Attributes:
        columns: columns that it begins at.
        native: attributes of each of Transformers' own layers.
        changes: what was changed for it, before it began.
    """

    columns: int
    native: dict[int, dict[str, Any]]
    changes: list[Undoable] = field(default_factory=list)


class CacheState(compat.Cache):
    """The layers of a cache and what they have in common.

    Args:
        config: choices of the cache.
        model_config: the model's.
        layers: one for each layer of the model.
        ledger: shared by these layers.
        model: that the cache serves, if it is known; held weakly.

    Attributes:
        forward: the forward in progress, or the last one.
        torn: whether a forward broke off that could not be undone in every layer.
        read_with: states of the model's adapters under which prompts were read.
        rounds: verifications of drafts; `drafted` and `accepted` count their drafts.
        hook: on the model; None for a cache of a config.
        turn: the call of `generate` in progress.
    """

    def __init__(
        self,
        config: OasisConfig,
        model_config: PreTrainedConfig,
        layers: list[Any],
        ledger: PaddingLedger,
        model: torch.nn.Module | None,
    ) -> None:
        super().__init__(layers=layers)
        self.oasis_config, self.model_config, self.ledger = config, model_config, ledger
        self._ours = [n for n, x in enumerate(layers) if isinstance(x, OasisLayer | DenseLayer)]
        self._recurrent = [n for n, x in enumerate(layers) if compat.is_linear(x)]
        self._first = next(n for n, x in enumerate(layers) if hasattr(x, "update"))
        self._checkpoint: Checkpoint | None = None
        self.forward: Forward | None = None
        self._drafting = Drafting.OFF
        self._hint = Hint()
        self.torn = False
        self.read_with: set[tuple[Any, ...]] = set()
        self.rounds = self.drafted = self.accepted = 0
        self.hook: Hook | None = None
        self.turn: Turn | None = None
        self.ledger.abandon = weakref.WeakMethod(self._abandon)
        self._model = None if model is None else weakref.ref(model)

    @property
    def offloaded(self) -> list[OasisLayer]:
        """The offloaded layers."""
        return [layer for layer in self.layers if isinstance(layer, OasisLayer)]

    @property
    def model(self) -> Any:
        """The model that the cache serves, or None if it was built from a config."""
        return None if self._model is None else self._model()

    def next_forward(self, rows: int) -> Forward:
        """What the forward of `rows` new tokens that comes next is, or the one in progress."""
        seen, known = self.hook is not None and self.hook.active, self.forward
        if known is not None and known.rows == rows and (seen or known.recorded):
            return known
        return self.describe(rows)

    def describe(self, rows: int, keep: int = 0, **known: Any) -> Forward:
        """What the next forward is, by what the cache knows and its caller; see `describe`.

        Args:
            rows: new columns.
            keep: newest columns whose logits are wanted; 0 if that is not known.
            **known: fields of the `Forward` that its caller knows.
        """
        config = self.oasis_config
        made = describe(
            self.ledger.columns,
            rows,
            self._drafting,
            max_rows=config.max_rows,
            exact=config.verification == "exact",
            hint=self._hint,
            keep=keep,
        )
        return replace(made, **known)

    def expect(self, prompt: bool = False, agreed: bool = False) -> None:
        """Say what is known of the next forward, until it ends; by default nothing.

        Args:
            prompt: it is a prompt, however short, where verifications are due.
            agreed: its mask certainly says of earlier columns what was recorded.
        """
        self._hint = Hint(prompt, agreed)

    @property
    def drafts_announced(self) -> bool:
        """Whether the next forward is a prompt after which drafts come."""
        return self._drafting is Drafting.ANNOUNCED

    @property
    def mask_agrees(self) -> bool:
        """Whether the next forward's mask is known to say what was recorded."""
        return self._hint.agreed

    def begin(self, forward: Forward) -> None:
        """Open a forward.

        Raises:
            HostMemoryError: its tokens do not fit; no layer has taken any.
        """
        if self.hook is not None and forward.dense and forward.rows > 1:
            self.hook.notice(self, forward.rows)
        if forward.dense and (model := self.model) is not None:
            if not self.ledger.columns:
                self.read_with.clear()
            self.read_with.add(adapter_state(model))
        self.forward, self._hint = forward, Hint()
        if self._drafting is Drafting.ANNOUNCED and not (self.hook and self.hook.feeds_pieces):
            self._drafting = Drafting.ON
        for layer in self.offloaded[:1]:
            layer.prompts.ahead.clear()
        holding = [layer for layer in self.offloaded if layer.is_initialized]
        # Layers grow together, and rarely.
        if holding and not holding[0].parts.fits(forward.rows):
            for layer in holding:
                layer.parts.grow(forward.rows)

    def checkpoint(self) -> Checkpoint:
        """Where to return to if the next forward breaks off."""
        native = native_state(self)
        return Checkpoint(
            self.ledger.columns, {n: x for n, x in native.items() if n not in self._ours}
        )

    @kept_steady
    def roll_back(self, checkpoint: Checkpoint) -> None:
        """Undo a forward that broke off, in every layer."""
        columns = checkpoint.columns
        self.torn = bool(self._recurrent)
        for number, state in checkpoint.native.items():
            vars(self.layers[number]).update(state)
        self.ledger.remove(self.ledger.columns - columns)
        if not columns and not checkpoint.changes:
            # The next prompt may have another batch size.
            self.ledger.reset()
        real = self.ledger.real()
        for layer in (self.layers[number] for number in self._ours):
            if not columns and not checkpoint.changes:
                layer.reset()
            elif isinstance(layer, OasisLayer):
                layer.roll_back(columns, None if real is None else real.sum(1).to(layer.device))
            else:
                layer.drop(layer.columns - columns, 0)
        for change in reversed(checkpoint.changes):
            change.undo(self)
        self.forward = None
        self.expect()

    def forget_gradients(self) -> None:
        """Keep nothing that a finished forward would need for a gradient."""
        for number in self._recurrent:
            compat.detach_states(self.layers[number])

    def _open(self) -> None:
        """Begin a forward of a cache without a hook.

        Raises:
            OasisUnsupportedError: the last one broke off; it is undone.
        """
        self.forget_gradients()
        if self._broken:
            self._abandon()
            raise OasisUnsupportedError(
                "an earlier forward broke off part of the way; its tokens have been taken back, "
                "call again"
            )
        self._checkpoint = self.checkpoint()

    @property
    def _broken(self) -> bool:
        """Whether a forward without a hook broke off between two layers."""
        return self._checkpoint is not None and self._uneven

    @property
    def _uneven(self) -> bool:
        """Whether layers hold different numbers of tokens."""
        held = {
            int(layer.get_seq_length())
            for layer in self.layers
            if not (compat.is_linear(layer) or compat.is_placeholder(layer))
        }
        return held != {self.ledger.columns}

    def settle(self) -> None:
        """Undo what a forward that broke off has left, so that all parts hold the same tokens.

        Raises:
            OasisUnsupportedError: it cannot be undone in every layer.
        """
        self.close()
        self._check_whole()

    def close(self) -> None:
        """The last forward is over: other changes follow, and nothing returns to before it.

        torch calls no hook after a `KeyboardInterrupt`. If one has come between two layers, what it
        left of the forward is undone first.
        """
        if self.hook is None:
            if self._broken:
                self._abandon()
        elif self._uneven or self._recurrent:
            # How far a recurrent state has come cannot be seen.
            self.hook.settle(self)
        else:
            self.hook.keep()
        self._checkpoint = None

    def _abandon(self) -> None:
        """Undo the forward in progress, where no hook does it."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if self.hook is None and checkpoint is not None:
            self.roll_back(checkpoint)

    def _check_whole(self) -> None:
        """Refuse to go on from a forward that broke off part of the way."""
        held = {self.layers[number].columns for number in self._ours}
        if self.torn or len(held) > 1:
            raise OasisUnsupportedError(
                "an earlier forward broke off part of the way, and its tokens cannot be taken back "
                "from every layer; call cache.reset() and read the prompt again"
            )


def native_state(cache: CacheState) -> dict[int, dict[str, Any]]:
    """Attributes of every layer that is not offloaded.

    Their updates replace tensors; a recurrent state alone is changed in place.
    """
    return {
        number: dict(vars(layer))
        for number, layer in enumerate(cache.layers)
        if not isinstance(layer, OasisLayer)
    }
