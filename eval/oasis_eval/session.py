"""Reading a prompt once, and continuing copies of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from oasis_hf import OasisCache
from oasis_hf.compat import cache_kwarg
from oasis_hf.index import index_class
from oasis_hf.layer import OasisLayer

from .arms import Arm

PREFILL_CHUNK = 512
COUNTED = ("hit_rate", "fetched_now", "admitted", "refused", "turnover")
"""What is kept of a cache's stats, besides bytes."""


def feed(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Logits `[rows, vocabulary]` after `ids` `[rows, tokens]`."""
    passed = {cache_kwarg(model): cache}
    out = model(input_ids=ids.to(model.device), logits_to_keep=1, use_cache=True, **passed)
    return out.logits[:, -1]


def read(model: Any, ids: Tensor) -> OasisCache:
    """Reads `ids` `[rows, tokens]` densely, in pieces."""
    base = OasisCache(model, index="streaming", on_miss="skip")
    for piece in ids.split(PREFILL_CHUNK, dim=1):
        feed(model, base, piece)
    return base


def dense_copy(model: Any, base: OasisCache) -> DynamicCache:
    """The same contents in Transformers' own cache.

    Raises:
        ValueError: some layers are not offloaded, so that their contents may not be all there.
    """
    copy = DynamicCache(config=model.config)
    for number, layer in enumerate(base.layers):
        if not isinstance(layer, OasisLayer):
            raise ValueError(f"layer {number} is not offloaded: read the prompt into DynamicCache")
        k, v, _ = layer.history(layer.lengths.tolist())
        copy.update(k, v, number)
    return copy


class Session:
    """One prompt that was read, to be continued by any number of arms.

    Args:
        model: the model, with its attention set to "oasis".
        ids: `[tokens]` all of the prompt but its last token.
    """

    def __init__(self, model: Any, ids: list[int]) -> None:
        self.model, self.ids = model, torch.tensor([ids])
        started = time.perf_counter()
        self.base = read(model, self.ids)
        self.seconds = time.perf_counter() - started

    def cache(self, arm: Arm) -> Any:
        """A copy for one arm."""
        if not arm.dense:
            return self.base.fork(**arm.options)
        if all(isinstance(layer, OasisLayer) for layer in self.base.layers):
            return dense_copy(self.model, self.base)
        cache = DynamicCache(config=self.model.config)
        for piece in self.ids.split(PREFILL_CHUNK, dim=1):
            feed(self.model, cache, piece)
        return cache


@dataclass
class Answer:
    """What one arm answered.

    Attributes:
        text: the answer without its end.
        ids: its tokens.
        pending: of these, what the cache has not been given yet: the last one, unless the model
            ended the answer itself.
    """

    text: str
    ids: list[int]
    pending: list[int]


def answer(
    model: Any,
    tokenizer: Any,
    cache: Any,
    ids: list[int],
    limit: int,
    complete: Callable[[str], bool],
) -> Answer:
    """Decodes greedily.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        cache: holds all before `ids`.
        ids: what is given next; decoding starts after its last token.
        limit: most tokens.
        complete: whether an answer can get no better, so that decoding may stop.
    """
    found: list[int] = []
    pending: list[int] = []
    text = ""
    # The last token alone, so that it attends as decoded ones do.
    if ids[:-1]:
        feed(model, cache, torch.tensor([ids[:-1]]))
    token, last = torch.tensor([ids[-1:]]), ends(model, tokenizer)
    while len(found) < limit:
        token = feed(model, cache, token).argmax(-1, keepdim=True)
        new = int(token.item())
        pending = [] if new in last else [new]
        if new in last:
            break
        found.append(new)
        text = tokenizer.decode(found, skip_special_tokens=True)
        if complete(text):
            break
    return Answer(text.strip(), found, pending)


def ends(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer."""
    of_model = model.generation_config.eos_token_id
    listed = of_model if isinstance(of_model, list) else [of_model]
    return {token for token in (tokenizer.eos_token_id, *listed) if token is not None}


def counts(cache: Any) -> dict[str, float]:
    """What a cache counted: shares of the wanted blocks, and bytes fetched per step."""
    if not isinstance(cache, OasisCache):
        return {}
    stats = cache.stats()
    found = {name: round(getattr(stats, name), 5) for name in COUNTED}
    moved = stats.bytes_fetched - stats.bytes_filled
    return found | {"steps": stats.steps, "bytes_per_step": moved / max(1, stats.steps)}


def attended(cache: OasisCache, lengths: range) -> float:
    """Tokens attended to per KV head, the tail included, mean over steps at these lengths."""
    config = cache.oasis_config
    group = index_class(config.index).group_tokens(config.block_size)
    total = 0
    for length in lengths:
        stored = max(0, length - config.recent_tokens) // group * group
        total += min(config.budget, stored) + length + 1 - stored
    return round(total / len(lengths), 1)
