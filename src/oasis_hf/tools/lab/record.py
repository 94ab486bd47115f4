"""Records a real generation: reads a context, then feeds rounds of rows and keeps Q and K."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ...integration.attention import NAME, oasis_attention, register
from .drafts import Drafter, find_match
from .recording import Run, stack_rounds
from .tree import Tree


class Capture:
    """Keeps what attention "oasis" is given, of every layer, for the newest rows of a forward.

    Attributes:
        query: by layer, `[Hq, T, D]`.
        key: by layer, `[H, T, D]`.
        scaling: factor of the logits.
    """

    def __init__(self, model: Any) -> None:
        self.layers = model.get_decoder().layers
        self.query: dict[int, Tensor] = {}
        self.key: dict[int, Tensor] = {}
        self.scaling = 0.0
        self._inputs: list[tuple[Tensor, Any]] = []
        self._peeking = False

    @contextmanager
    def __call__(self) -> Iterator[Capture]:
        """Capture inside the block; the registered attention is as before afterwards."""
        AttentionInterface.register(NAME, self._attention)
        hooks = [x.register_forward_pre_hook(self._enter, with_kwargs=True) for x in self.layers]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
            register()

    def start(self) -> None:
        """Forget the forward before."""
        self.query, self.key, self._inputs = {}, {}, []

    def taken(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[L, Hq, T, D]`, keys `[L, H, T, D]`, and queries of the layer before.

        These are what a layer's projection makes of the hidden state before the previous layer.
        """
        query, self.query, self._peeking = self.query, {0: torch.zeros_like(self.query[0])}, True
        try:
            for layer, (hidden, rope) in zip(self.layers[1:], self._inputs, strict=False):
                normed = layer.input_layernorm(hidden)
                layer.self_attn(normed, position_embeddings=rope, attention_mask=None)
            parts = (query, self.key, self.query)
            one, two, three = (torch.stack([part[n] for n in sorted(part)]) for part in parts)
            return one, two, three
        finally:
            self._peeking = False

    def _enter(self, module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._inputs.append((hidden, kwargs["position_embeddings"]))

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        number = module.layer_idx
        self.query[number] = query[0].clone()
        if self._peeking:
            return torch.zeros_like(query).transpose(1, 2), None
        self.key[number] = key[0, :, -query.shape[2] :].clone()
        scaling = kwargs.get("scaling")
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return oasis_attention(module, query, key, value, mask, **kwargs)


@torch.inference_mode()
def read(model: Any, ids: list[int], cache: Any) -> tuple[Tensor, float]:
    """Read a context into a cache: its keys `[L, H, C, D]`, and the factor of the logits."""
    with Capture(model)() as capture:
        given = torch.tensor([ids], device=model.device)
        model(input_ids=given, past_key_values=cache, logits_to_keep=1)
    return torch.stack([capture.key[n] for n in sorted(capture.key)]), capture.scaling


@dataclass(frozen=True)
class Round:
    """One step or verification: rows are the newest committed token, drafts, then probes."""

    start: int
    accepted: int
    drafts: list[int]
    probes: list[int]
    match: int


def rounds_of(
    ids: list[int], context: int, draft: Drafter | None = None, probe: Drafter | None = None
) -> Iterator[Round]:
    """Rounds over a text that is known: what the text does not say next is rejected.

    Args:
        ids: the context and its continuation.
        context: tokens that are read before.
        draft: proposes rows to verify, or None for one token a step.
        probe: proposes rows that only look ahead, or None.
    """
    done = context
    while len(ids) - done > 1:
        known = ids[: done + 1]
        drafts = draft(known) if draft else []
        accepted = _common(drafts, ids[done + 1 : -1])
        start, done = done, done + accepted + 1
        yield Round(
            start, accepted, drafts, probe(known) if probe else [], find_match(ids[: done + 1])
        )


@torch.inference_mode()
def generate(model: Any, ids: list[int], rounds: Iterable[Round], cache: Any) -> Run:
    """Feed one round after the other to any cache, which holds all committed tokens afterwards."""
    rounds, found = list(rounds), []
    with Capture(model)() as capture:
        for turn in rounds:
            capture.start()
            rows = [ids[turn.start], *turn.drafts, *turn.probes]
            given = torch.tensor([rows], device=model.device)
            # All logits, as in a verification: asking for the last one alone means a prompt.
            model(input_ids=given, past_key_values=cache)
            found.append(capture.taken())
            cache.crop(-(len(rows) - 1 - turn.accepted))
    return _run(rounds, *(stack_rounds(list(part)) for part in zip(*found, strict=True)))


@torch.inference_mode()
def generate_at_once(
    model: Any, ids: list[int], context: int, rounds: Iterable[Round], cache: Any
) -> Run:
    """All rounds in one forward over a `DynamicCache` of the context, which is left as it was.

    The text is known and attention is dense, so a row sees what it would see in its own round: the
    committed tokens before it, and its own round's drafts.
    """
    rounds, tree = list(rounds), Tree(context)
    trunk = tree.extend(ids[context:-1], -1)
    places = []
    for turn in rounds:
        first = turn.start - context
        kept = trunk[first : first + turn.accepted + 1]
        places.append(kept + tree.extend([*turn.drafts[turn.accepted :], *turn.probes], kept[-1]))
    with Capture(model)() as capture:
        tree.forward(model, cache)
        taken = capture.taken()
    return _run(rounds, *(stack_rounds([part[:, :, row] for row in places]) for part in taken))


def _run(rounds: list[Round], query: Tensor, key: Tensor, peek: Tensor) -> Run:
    return Run(
        query=query,
        key=key,
        peek=peek,
        start=torch.tensor([turn.start for turn in rounds]),
        rows=torch.tensor([1 + len(turn.drafts) for turn in rounds]),
        accepted=torch.tensor([turn.accepted for turn in rounds]),
        probes=torch.tensor([len(turn.probes) for turn in rounds]),
        match=torch.tensor([turn.match for turn in rounds]),
    )


def _common(drafts: list[int], text: list[int]) -> int:
    """How many drafts the text confirms."""
    same = [a == b for a, b in zip(drafts, text, strict=False)]
    return same.index(False) if False in same else len(same)
