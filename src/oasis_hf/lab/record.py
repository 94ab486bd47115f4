"""Records a real generation: reads a context once, then feeds rounds of rows and keeps Q and K."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ..attention import NAME, oasis_attention, register
from .drafts import Drafter, find_match
from .recording import Run, stack_rounds


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

    def peek(self) -> list[Tensor]:
        """Queries `[Hq, T, D]` that each layer makes of the state before the previous layer."""
        real, self._peeking = self.query, True
        self.query = {}
        try:
            for layer, (hidden, rope) in zip(self.layers[1:], self._inputs, strict=False):
                normed = layer.input_layernorm(hidden)
                layer.self_attn(normed, position_embeddings=rope, attention_mask=None)
            found = [torch.zeros_like(real[0]), *(self.query[n] for n in sorted(self.query))]
        finally:
            self.query, self._peeking = real, False
        return found

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


@torch.inference_mode()
def generate(
    model: Any,
    ids: list[int],
    context: int,
    cache: Any,
    draft: Drafter | None = None,
    probe: Drafter | None = None,
    rounds: int | None = None,
) -> Run:
    """Rounds over a text that is known: what the text does not say next is rejected.

    Args:
        model: a causal language model with attention "oasis".
        ids: the context and its continuation.
        context: tokens of it that `cache` holds.
        cache: any cache; it holds all committed tokens afterwards.
        draft: proposes rows to verify, or None for one token a step.
        probe: proposes rows that only look ahead, or None.
        rounds: most rounds; by default until the continuation ends.
    """
    found: dict[str, list[Any]] = {name: [] for name in Run.__dataclass_fields__}
    done = context
    with Capture(model)() as capture:
        while len(ids) - done > 1 and (rounds is None or len(found["start"]) < rounds):
            capture.start()
            known = ids[: done + 1]
            drafts = draft(known) if draft else []
            probes = probe(known) if probe else []
            accepted = _common(drafts, ids[done + 1 : -1])
            rows = [ids[done], *drafts, *probes]
            capture.start()
            given = torch.tensor([rows], device=model.device)
            # All logits, as in a verification: asking for the last one alone means a prompt.
            model(input_ids=given, past_key_values=cache)
            for name, parts in (("query", capture.query), ("key", capture.key)):
                found[name].append(torch.stack([parts[n] for n in sorted(parts)]))
            found["peek"].append(torch.stack(capture.peek()))
            cache.crop(-(len(rows) - 1 - accepted))
            counts = {"start": done, "rows": 1 + len(drafts), "accepted": accepted}
            done += accepted + 1
            counts |= {"probes": len(probes), "match": find_match(ids[: done + 1])}
            for name, count in counts.items():
                found[name].append(count)
    tensors = {name: stack_rounds(found.pop(name)) for name in ("query", "key", "peek")}
    return Run(**tensors, **{name: torch.tensor(counts) for name, counts in found.items()})


def _common(drafts: list[int], text: list[int]) -> int:
    """How many drafts the text confirms."""
    same = [a == b for a, b in zip(drafts, text, strict=False)]
    return same.index(False) if False in same else len(same)
