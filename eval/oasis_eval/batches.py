"""Which samples are read and answered together, and how many fit."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import torch

from oasis_hf.compat import text_config

from .sample import Sample

CPU_TOKENS = 16_384
"""Tokens that a CPU reads together: enough to share the weights between rows."""
DEVICE_COPIES = 2.6
"""Device memory of one row in sizes of its KV: what was read, a dense copy, and what a step of
one layer takes."""
SHARE = 0.85
"""Share of the free memory that is counted on."""


def batches(samples: Iterable[Sample], most: int) -> Iterator[list[Sample]]:
    """Samples of one question and one length, at most so many together; the others alone."""
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        together = len(sample["turns"]) == 1
        key = sample["tokens"] if together else (sample["number"],)
        groups.setdefault(key, []).append(sample)
    for group in groups.values():
        for first in range(0, len(group), most):
            yield group[first : first + most]


def fitting(model: Any, context: int) -> int:
    """Samples of `context` tokens that are read and answered together."""
    if model.device.type != "cuda":
        return max(1, CPU_TOKENS // context)
    # What an earlier batch took is free again only once its caches, parts of cycles, are collected.
    gc.collect()
    torch.cuda.empty_cache()
    row = kv_bytes(model) * context
    device = torch.cuda.mem_get_info(model.device)[0] / (DEVICE_COPIES * row)
    host = psutil.virtual_memory().available / row
    return max(1, int(SHARE * min(device, host)))


def kv_bytes(model: Any) -> int:
    """Bytes of the keys and values of one token."""
    config = text_config(model.config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize)
