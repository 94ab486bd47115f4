"""A model's own elementwise work, fused by `torch.compile` around the attention of this package."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import NAME, oasis_attention


class FusedLayers:
    """The decoder layers of a model, compiled; used where `active` says so, untouched elsewhere.

    Norms, rotary embedding, gates and residuals become a few kernels a layer. The store and the
    attention stay opaque: compiled code stops before them and goes on behind them, which costs
    nothing in a step that is replayed as one CUDA graph.

    Args:
        model: the model.
        cache: the cache whose `update` its layers call.
        backend: of `torch.compile`.
    """

    def __init__(self, model: torch.nn.Module, cache: Any, backend: str = "inductor") -> None:
        _make_opaque(next(base for base in type(cache).__mro__ if "update" in vars(base)))
        layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
        # A forward of its own belongs to someone else: a hook that moves weights, for example.
        self._layers = [layer for layer in layers if "forward" not in vars(layer)]
        self._compiled = [
            torch.compile(layer.forward, backend=backend, dynamic=False) for layer in self._layers
        ]

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this block the layers run compiled."""
        # The number of a layer is a constant of its code: one variant for each of them.
        limit = 8 + 4 * len(self)
        try:
            for layer, compiled in zip(self._layers, self._compiled, strict=True):
                layer.forward = compiled
            with torch._dynamo.config.patch(
                recompile_limit=limit, accumulated_recompile_limit=8 * limit
            ):
                yield
        finally:
            for layer in self._layers:
                vars(layer).pop("forward", None)


@functools.cache
def _make_opaque(owner: type) -> None:
    """Keep the compiler out of a cache class's `update` and of attention "oasis"."""
    owner.update = torch.compiler.disable(owner.update)  # type: ignore[attr-defined]
    AttentionInterface.register(NAME, torch.compiler.disable(oasis_attention))
