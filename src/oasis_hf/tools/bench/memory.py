"""Memory of the device: what the sizes of a cache predict, and what a piece of a prompt takes."""

from __future__ import annotations

import gc
from typing import Any

import torch

from ...cache import OasisCache
from ...facts.compat import cache_kwarg

LONGEST_PIECE = 2048
PIECE_TOKENS = 16_384
"""Tokens of the last piece of a prompt, over the whole batch, at most."""


def piece(batch: int) -> int:
    """Tokens of each sequence in the last piece of a prompt."""
    return min(LONGEST_PIECE, PIECE_TOKENS // batch)


def predicted_bytes(cache: OasisCache, model: torch.nn.Module) -> int:
    """Weights, and the pools, tails, indexes and tables of the offloaded layers.

    What a forward allocates on the way is not in it.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return weights + sum(
        layer.parts.geometry.fast_bytes(layer.batch_size, layer.parts.residency.slots)
        + layer.parts.index.nbytes
        + layer.parts.residency.nbytes
        for layer in cache.offloaded
        if layer.is_initialized
    )


def predicted_piece_bytes(cache: OasisCache, model: torch.nn.Module) -> int:
    """What the last piece of a prompt takes besides.

    Earlier tokens of one sequence and one layer, as they are attended to and as the next come over
    the link; and of the model's own work what is alive at once: three vectors of the width of a
    multi-layer perceptron (gate, up, their product) and five of the hidden width.
    """
    config: Any = model.config
    layer = cache.offloaded[0]
    width = 3 * config.intermediate_size + 5 * config.hidden_size
    tokens = layer.batch_size * piece(layer.batch_size)
    earlier = 2 * layer.columns * layer.parts.geometry.token_bytes
    return int(earlier + tokens * width * layer.parts.geometry.itemsize)


def release() -> None:
    """Give back what earlier cases held on the device, the frames of a failed one included."""
    gc.collect()
    torch.cuda.empty_cache()


@torch.no_grad()
def prompt_peak(model: torch.nn.Module, cache: OasisCache, vocabulary: int) -> int:
    """Peak of HBM while one more `piece` of each sequence is read as the end of a prompt."""
    batch = cache.offloaded[0].batch_size
    ids = torch.randint(1, vocabulary, (batch, piece(batch)), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_kwarg(model): cache})
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
