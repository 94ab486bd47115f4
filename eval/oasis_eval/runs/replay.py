"""The selection of blocks replayed on captured queries and keys, token by token.

Nothing is generated, so this compares options faster, and with less noise, than answers can.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from oasis_hf.config import OasisConfig
from oasis_hf.facts.compat import cache_kwarg
from oasis_hf.index import Index, index_class
from oasis_hf.storage.residency import Residency
from oasis_kernels import backend

TAIL_GROUP = 64
"""The same tail for every index, that of the largest groups, so that only the choice differs."""
OPS = backend("reference")
ROUNDING = 1e-5
"""Relative difference of masses that are taken for equal."""
Layer = tuple[Tensor, Tensor, float]
"""Queries `[Hq, T, D]`, keys `[H, L, D]` and the factor of the logits."""


@dataclass(frozen=True)
class Replayed:
    """What the chosen blocks of one layer held, for every step and KV head.

    Attributes:
        mass: `[T, H]` share of the attention that chosen blocks and tail hold.
        recall: `[T, H]` share, of the blocks that truly hold most, that were attended to; as many
            of those as the budget has.
        fetched: `[T, H]` share of the wanted blocks that were fetched before attention.
    """

    mass: Tensor
    recall: Tensor
    fetched: Tensor


def capture(model: Any, cache: Any, ids: Tensor) -> tuple[Tensor, list[Layer]]:
    """Attends to everything, and keeps what the attention was given.

    Args:
        model: the model.
        cache: a `DynamicCache` of all tokens before `ids`; it is extended.
        ids: `[1, T]` tokens.

    Returns:
        Logits `[T, vocabulary]`, and queries of `ids` and keys of all tokens, of every layer.
    """
    found: dict[int, Layer] = {}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any):  # type: ignore[no-untyped-def]
        scaling = kw.get("scaling") or module.scaling
        found[module.layer_idx] = (query[0], key[0], scaling)
        return sdpa_attention_forward(module, query, key, value, *args, **kw)

    AttentionInterface.register("capture", attention)
    AttentionMaskInterface.register("capture", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation("capture")
    try:
        out = model(input_ids=ids.to(model.device), use_cache=True, **{cache_kwarg(model): cache})
    finally:
        model.set_attn_implementation(before)
    return out.logits[0], [found[number] for number in sorted(found)]


def replay(layer: Layer, config: OasisConfig) -> Replayed:
    """One layer's choices under some options."""
    # In float32 one layer at a time: all of them would not fit beside a long context.
    query, keys, scaling = layer[0].float(), layer[1].float(), layer[2]
    heads, length, _ = keys.shape
    steps, block, wanted = query.shape[1], config.block_tokens, config.budget_blocks
    rows = query.unflatten(0, (heads, -1)) * scaling
    index = _index(config, keys)
    slots = int(config.head_room * wanted)
    shape: Any = SimpleNamespace(kv_heads=heads, slots=slots)
    residency = Residency(shape, 1, keys.device, OPS)
    residency.ensure(index.capacity)
    number = torch.arange(index.capacity, device=keys.device)
    found: list[list[Tensor]] = []
    for step in range(steps):
        now = length - steps + step + 1
        stored = max(0, now - 1 - config.recent_tokens) // TAIL_GROUP * TAIL_GROUP
        logits = rows[:, :, step] @ keys[:, :now].transpose(-1, -2)
        tail = torch.logsumexp(logits[..., stored:], -1)
        committed = torch.tensor([stored // block], device=keys.device)
        score = index.score(rows[None, :, :, step], committed, tail[None])
        sink = (number < committed) & (number < -(-config.sink_tokens // block))
        score = torch.where(sink, float("inf"), score)
        if not step:
            residency.step(score, slots, float("-inf"), 0)
        plan = residency.step(score, wanted, config.misses.threshold(0, 1), config.cap_blocks)
        share = logits.softmax(-1)
        mass = share[..., :stored].unflatten(-1, (-1, block)).sum(-1).mean(1)
        padded = torch.nn.functional.pad(mass, (0, index.capacity - mass.shape[-1]))
        used = ((plan.hits >= 0) | (plan.now >= 0))[0]
        held = (padded.gather(-1, plan.ids[0]) * used).sum(-1)
        attended = torch.zeros_like(padded).scatter_add(-1, plan.ids[0], used.to(padded.dtype)) > 0
        recall = _recall(mass, attended[:, : mass.shape[-1]], wanted)
        fetched = (plan.now >= 0).float().mean(-1)[0]
        found.append([held + share[..., stored:].sum(-1).mean(1), recall, fetched])
    return Replayed(*(torch.stack(column) for column in zip(*found, strict=True)))


def everything(layer: Layer) -> Replayed:
    """One layer that stays dense."""
    ones = torch.ones(layer[0].shape[1], layer[1].shape[0], device=layer[1].device)
    return Replayed(ones, ones, torch.zeros_like(ones))


def _recall(mass: Tensor, attended: Tensor, wanted: int) -> Tensor:
    """Share of the best `wanted` blocks that were attended to: mass and attended `[H, N]`.

    Blocks that hold as much as the last of the best, but for rounding, are as good as it.
    """
    count = min(wanted, mass.shape[-1])
    if not count:
        return mass.new_ones(mass.shape[0])
    least = mass.topk(count, -1).values[:, -1:]
    return ((mass >= least * (1 - ROUNDING)) & attended).sum(-1).clamp(max=count) / count


def _index(config: OasisConfig, keys: Tensor) -> Index:
    """The index over all full groups of the keys."""
    block = config.block_tokens
    index = index_class(config.index)(block, config.budget_blocks, config.reduction, OPS)
    group = index.group_tokens(block)
    full = keys.shape[1] // group
    index.ensure(full * group // block)
    index.allocate(1, keys.shape[0], keys[None])
    index.write_range(slice(0, 1), 0, keys[None, :, : full * group].unflatten(2, (full, group)))
    return index
