"""Makes the stats of a cache out of its layers."""

from __future__ import annotations

from typing import Any

import torch

from .layers.state import CacheState
from .stats import COUNTS, CacheStats
from .storage.link import stated


def summarise(cache: CacheState) -> CacheStats:
    """Read every counter of `cache`; waits for the device."""
    config = cache.oasis_config
    layers = [layer for layer in cache.offloaded if layer.is_initialized]
    sums = dict.fromkeys(COUNTS, 0)
    fetched = filled = 0
    for layer in layers:
        counts = layer.parts.counters.read()
        for name, value in counts.items():
            sums[name] += value
        block_bytes = layer.parts.store.block_bytes
        fetched += block_bytes * (counts["now"] + counts["later"] + counts["filled"])
        filled += block_bytes * counts["filled"]
    wanted = max(1, sums["wanted"])
    fast = sum(layer.parts.pool.nbytes + layer.parts.tail.nbytes for layer in layers)
    index = sum(layer.parts.index.nbytes for layer in layers)
    tables = sum(layer.parts.residency.nbytes for layer in layers)
    full = sum(
        layer.batch_size * layer.columns * layer.parts.geometry.token_bytes for layer in layers
    )
    native = [x for x in cache.layers if x not in cache.offloaded]
    host = sum(layer.parts.store.nbytes for layer in layers)
    used = [layer.parts.used_bytes() for layer in layers]
    steps = max((layer.parts.counters.read()["steps"] for layer in layers), default=0)
    cap = layers[0].parts.cap if layers else stated(config)
    return CacheStats(
        context_tokens=cache.ledger.columns,
        batch_size=layers[0].batch_size if layers else 0,
        sparse_layers=len(cache.offloaded),
        native_layers=len(native),
        budget_tokens=config.budget_tokens,
        budget_asked=config.budget,
        block_tokens=config.block_tokens,
        resident_tokens=layers[0].parts.residency.slots * config.block_tokens if layers else 0,
        steps=steps,
        hit_rate=sums["hits"] / wanted,
        fetched_now=sums["now"] / wanted,
        admitted=sums["later"] / wanted,
        refused=(sums["wanted"] - sums["hits"] - sums["now"] - sums["later"]) / wanted,
        cap_blocks=min(cap.blocks, layers[0].parts.wanted) if layers else cap.blocks,
        cap_share=cap.blocks / config.budget_blocks,
        link_rate=cap.link,
        step_floor=cap.floor,
        turnover=sums["turnover"] / wanted,
        bytes_fetched=fetched,
        bytes_filled=filled,
        rounds=cache.rounds,
        drafted=cache.drafted,
        accepted=cache.accepted,
        hbm_bytes=fast + index + tables,
        hbm_used_bytes=sum(fast for fast, _ in used),
        index_bytes=index,
        native_bytes=sum(_bytes(layer) for layer in native),
        host_bytes=host,
        host_used_bytes=sum(stored for _, stored in used),
        full_kv_bytes=full,
        note=_note(cache, steps, fast + index + tables, full),
    )


def _bytes(layer: Any) -> int:
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def _note(cache: CacheState, steps: int, fast: int, full: int) -> str:
    """What a reader should know first, in one sentence."""
    budget, context = cache.oasis_config.budget_tokens, cache.ledger.columns
    if not context:
        return "the cache is empty"
    if not steps:
        return "no sparse step yet: prompts are attended to densely"
    if budget is None:
        return "a budget of None attends to every token, as dense attention does"
    tail = cache.offloaded[0].parts.tail.places if cache.offloaded else 0
    if context <= budget + tail:
        return (
            f"sparsity never engaged: the context fits the budget of {budget} tokens and the tail, "
            "so the answer is dense attention's; a plain DynamicCache would do"
        )
    if fast >= full:
        return (
            "sparsity cannot pay yet: the working set is larger than the full KV; lower budget or "
            "head_room, or use it with a longer context"
        )
    return f"the working set is {fast / full:.0%} of the full KV"
