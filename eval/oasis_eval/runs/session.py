"""Reading prompts of one length once, and continuing copies of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from oasis_hf import OasisCache
from oasis_hf.config import OasisConfig
from oasis_hf.facts.compat import cache_kwarg
from oasis_hf.index import index_class
from oasis_hf.layers.layer import OasisLayer

from ..arms import Arm
from .stops import ends

PREFILL_CHUNK = 512
DEFAULTS = OasisConfig().as_dict()
COUNTED = ("hit_rate", "fetched_now", "admitted", "refused", "turnover")
"""What is kept of a cache's stats, besides bytes."""


def feed(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Logits `[rows, vocabulary]` after `ids` `[rows, tokens]`."""
    passed = {cache_kwarg(model): cache}
    out = model(input_ids=ids.to(model.device), logits_to_keep=1, use_cache=True, **passed)
    return out.logits[:, -1]


def read(model: Any, ids: Tensor, exact: bool = False, index: str = "streaming") -> OasisCache:
    """Reads `ids` `[rows, tokens]` densely; in pieces on a CPU, where they would take memory.

    An `index` that learns hands on what it learned to forks with an index of its kind.

    Unless `exact`, a GPU reads in TF32 where the model is in float32: all arms continue the same
    keys and values, and every decoded token is computed in full float32.
    """
    # It is never decoded with: the smallest working set there is.
    base = OasisCache(model, index=index, on_miss="skip", budget=16, head_room=1.0)
    pieces = [ids] if model.device.type == "cuda" else ids.split(PREFILL_CHUNK, dim=1)
    with nullcontext() if exact else _tf32():
        for piece in pieces:
            feed(model, base, piece)
    return base


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def dense_copy(model: Any, base: OasisCache) -> DynamicCache:
    """The same contents in Transformers' own cache.

    Raises:
        ValueError: some layers are not offloaded, so that their contents may not be all there.
    """
    return _dynamic(model, histories(base))


def histories(base: OasisCache) -> list[tuple[Tensor, Tensor]]:
    """K `[rows, heads, tokens, dim]` and V of every layer, on the device.

    Raises:
        ValueError: some layers are not offloaded, so that their contents may not be all there.
    """
    found = []
    for number, layer in enumerate(base.layers):
        if not isinstance(layer, OasisLayer):
            raise ValueError(f"layer {number} is not offloaded: read the prompt into DynamicCache")
        k, v, _ = layer.history(layer.parts.frontier.lengths.tolist())
        found.append((k, v))
    return found


def _dynamic(model: Any, held: list[tuple[Tensor, Tensor]]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    for number, (k, v) in enumerate(held):
        cache.update(k, v, number)
    return cache


class Session:
    """Prompts of one length that were read, to be continued by one arm after another.

    Where all layers are offloaded, arms share the host memory of what was read: only the newest
    arm's cache may be continued.

    Args:
        model: the model, with its attention set to "oasis".
        ids: `[rows][tokens]` all of the prompts but their last token.
        exact: whether a GPU reads them in the model's full precision.
    """

    def __init__(self, model: Any, ids: list[list[int]], exact: bool = False) -> None:
        self.model, self.ids = model, torch.tensor(ids)
        started = time.perf_counter()
        self.base = read(model, self.ids, exact)
        offloaded = all(isinstance(layer, OasisLayer) for layer in self.base.layers)
        self.held = histories(self.base) if offloaded else None
        self.seconds = time.perf_counter() - started

    def cache(self, arm: Arm) -> Any:
        """A copy for one arm."""
        if self.held is not None:
            return _dynamic(self.model, self.held) if arm.dense else self._borrowing(arm)
        if not arm.dense:
            return self.base.fork(**(DEFAULTS | arm.options))
        cache = DynamicCache(config=self.model.config)
        for piece in self.ids.split(PREFILL_CHUNK, dim=1):
            feed(self.model, cache, piece)
        return cache

    def keep(self, rows: list[int]) -> None:
        """Goes on with some of the rows alone, in this order; earlier caches are done with."""
        chosen = torch.tensor(rows)
        self.base.batch_select_indices(chosen)
        self.ids = self.ids[chosen]
        if self.held is not None:
            self.held = histories(self.base)

    def _borrowing(self, arm: Arm) -> OasisCache:
        """A cache over the host memory of what was read; a copy if its blocks have another size."""
        assert self.held is not None
        cache = OasisCache(self.model, **arm.options)
        equal = cache.oasis_config.block_tokens == self.base.oasis_config.block_tokens
        cache.ledger.copy_from(self.base.ledger)
        for old, new, (k, v) in zip(self.base.offloaded, cache.layers, self.held, strict=True):
            if isinstance(new, OasisLayer):
                new.adopt(
                    k, v, old.parts.frontier.lengths, old.columns, owner=old if equal else None
                )
            else:
                new.adopt(k, v)
        return cache


@dataclass
class Answer:
    """What one arm answered to one prompt.

    Attributes:
        text: the answer without its end.
        ids: its tokens.
        pending: of these, what the cache has not been given yet: the last one, unless the model
            ended the answer itself. Means nothing where rows were answered together.
        done: whether it has ended, or can get no better.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    done: bool = False


def answer(
    model: Any,
    tokenizer: Any,
    cache: Any,
    ids: list[list[int]],
    limit: int,
    complete: list[Callable[[str], bool]],
) -> list[Answer]:
    """Decodes greedily until every row is done; rows that are done earlier go on unheard.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        cache: holds all before `ids`.
        ids: `[rows][tokens]` what is given next; decoding starts after its last tokens.
        limit: most tokens of an answer.
        complete: for each row, whether an answer can get no better, so that it may stop.
    """
    given = torch.tensor(ids)
    # The last token alone, so that it attends as decoded ones do.
    if given.shape[1] > 1:
        feed(model, cache, given[:, :-1])
    token, last = given[:, -1:], ends(model, tokenizer)
    rows = [Answer() for _ in ids]
    for _ in range(limit):
        token = feed(model, cache, token).argmax(-1, keepdim=True)
        for row, new, full in zip(rows, token[:, 0].tolist(), complete, strict=True):
            if row.done:
                continue
            row.pending = [] if new in last else [new]
            row.done = new in last
            if not row.done:
                row.ids.append(new)
                row.text = tokenizer.decode(row.ids, skip_special_tokens=True).strip()
                row.done = full(row.text)
        if all(row.done for row in rows):
            break
    return rows


def counts(cache: Any) -> dict[str, float]:
    """What a cache counted: shares of the wanted blocks; bytes fetched per step, and held in fast
    memory, of each row."""
    if not isinstance(cache, OasisCache):
        kept = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept)
        return {"hbm_bytes": held / kept[0].keys.shape[0]} if kept else {}
    stats = cache.stats()
    found = {name: round(getattr(stats, name), 5) for name in COUNTED}
    rows = cache.offloaded[0].batch_size
    moved = (stats.bytes_fetched - stats.bytes_filled) / rows
    found |= {"steps": stats.steps, "bytes_per_step": moved / max(1, stats.steps)}
    return found | {"hbm_bytes": (stats.hbm_bytes + stats.native_bytes) / rows}


def attended(cache: OasisCache, lengths: range) -> float:
    """Tokens attended to per KV head, the tail included, mean over steps at these lengths."""
    config = cache.oasis_config
    group = index_class(config.index).group_tokens(config.block_tokens)
    total = 0
    for length in lengths:
        stored = max(0, length - config.recent_tokens) // group * group
        total += min(config.budget_blocks * config.block_tokens, stored) + length + 1 - stored
    return round(total / len(lengths), 1)
