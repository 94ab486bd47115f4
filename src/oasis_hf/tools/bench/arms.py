"""Filled caches of Transformers' own, and a decode step over each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from ...facts.compat import cache_kwarg
from .plan import ROOM, Case
from .workload import filled_cache, heated_keys

Step = Callable[[Tensor, Tensor], Any]
"""Runs one decode step of token ids `[B, 1]` at positions `[B, 1]`."""


def fill(model: LlamaForCausalLM, case: Case) -> Any:
    """The cache of a case, holding its context."""
    if case.arm == "oasis":
        return filled_cache(model, case.batch, case.tokens, case.heat, **case.options)
    config = model.config
    cache: Any
    if case.arm == "static":
        cache = StaticCache(config=config, max_cache_len=case.tokens + ROOM)
    else:
        cache = DynamicCache(config=config, offloading=case.arm == "offloaded")
    shape = (case.batch, config.num_key_value_heads, case.tokens, config.head_dim)
    keys = heated_keys(*shape, like=model.lm_head.weight, heat=case.heat)
    for layer in range(config.num_hidden_layers):
        cache.update(keys, keys, layer)
    return cache


def step_of(model: LlamaForCausalLM, case: Case, cache: Any) -> Step:
    """How this case decodes: the model's forward, or a graph of it where the cache allows one.

    An `OasisCache` brings its own graphs.
    """
    name = cache_kwarg(model)

    def step(ids: Tensor, positions: Tensor) -> Any:
        return model(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache})

    return captured(step, case.batch) if case.arm == "static" else step


def captured(step: Step, batch: int) -> Step:
    """`step` as one CUDA graph; it must keep all its state on the device, at fixed addresses."""
    ids = torch.ones(batch, 1, dtype=torch.long, device="cuda")
    positions = torch.zeros_like(ids)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(ids, positions)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step(ids, positions)

    def replay(new_ids: Tensor, new_positions: Tensor) -> None:
        ids.copy_(new_ids)
        positions.copy_(new_positions)
        graph.replay()

    return replay
