"""Memory of the device: what the sizes of a cache predict, and what a piece of a prompt takes."""

from __future__ import annotations

import gc

import torch

from ..cache import OasisCache
from ..compat import cache_kwarg

PIECE = 2048
"""Tokens of each sequence in the last piece of a prompt."""


def predicted_bytes(cache: OasisCache, model: torch.nn.Module) -> int:
    """Weights, and the pools, tails, indexes and tables of the offloaded layers.

    What a forward allocates on the way is not in it.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return weights + sum(
        layer.geometry.fast_bytes(layer.batch_size) + layer.index.nbytes + layer.residency.nbytes
        for layer in cache.offloaded
        if layer.is_initialized
    )


def release() -> None:
    """Give back what earlier cases held on the device, the frames of a failed one included."""
    gc.collect()
    torch.cuda.empty_cache()


@torch.no_grad()
def prompt_peak(model: torch.nn.Module, cache: OasisCache, vocabulary: int) -> int:
    """Peak of HBM while `PIECE` more tokens of each sequence are read as the end of a prompt."""
    ids = torch.randint(1, vocabulary, (cache.offloaded[0].batch_size, PIECE), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_kwarg(model): cache})
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
