"""Which samples are read and answered together, and how many fit."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import torch

from oasis_hf.facts.compat import text_config

from ..tasks import TASKS
from ..tasks.parts import Sample

CPU_TOKENS = 16_384
"""Tokens that a CPU reads together: enough to share the weights between rows."""
COPIES = 2.6
"""Device memory of answers in sizes of the KV: what was read, a dense copy, and what a step of one
layer takes."""
SHARE = 0.85
"""Share of the free memory that is counted on."""


def batches(samples: Iterable[Sample], most: int) -> Iterator[list[Sample]]:
    """Samples of one length, at most so many together; conversations and scored texts alone."""
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        together = len(sample["turns"]) == 1 or TASKS[sample["task"]].metric == "drift"
        key = sample["tokens"] if together else (sample["number"],)
        groups.setdefault(key, []).append(sample)
    for group in groups.values():
        # Batches of about one size.
        size = -(-len(group) // -(-len(group) // most))
        for first in range(0, len(group), size):
            yield group[first : first + size]


def fitting(model: Any, context: int) -> int:
    """Samples of `context` tokens that are read and answered together."""
    if model.device.type != "cuda":
        return max(1, CPU_TOKENS // context)
    # What an earlier batch took is free again only once its caches, parts of cycles, are collected.
    gc.collect()
    torch.cuda.empty_cache()
    stored, reading = token_bytes(model)
    free = torch.cuda.mem_get_info(model.device)[0]
    device = free / (context * max(COPIES * stored, stored + reading))
    host = psutil.virtual_memory().available / (context * stored)
    return max(1, int(SHARE * min(device, host)))


def token_bytes(model: Any) -> tuple[int, int]:
    """Bytes of the keys and values of one token, and of what one layer makes of it in reading."""
    config = text_config(model.config)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    stored = 2 * config.num_hidden_layers * kv_heads * dim
    # Rough counts of tensors that are alive together.
    reading = 8 * config.hidden_size + 4 * inner + 4 * heads * dim
    return stored * model.dtype.itemsize, reading * model.dtype.itemsize
