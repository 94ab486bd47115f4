"""A model's own elementwise work, fused by `torch.compile` around the attention of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from .merged import merge


class FusedLayers:
    """The decoder layers of a model, compiled; used where `active` says so, untouched elsewhere.

    Norms, rotary embedding, gates and residuals become a few kernels a layer. The store and the
    attention stay opaque: compiled code stops before them and goes on behind them, which costs
    nothing in a step that is replayed as one CUDA graph. Products of one input are one product.

    Args:
        model: the model. The weights that are multiplied together are laid side by side.
        backend: of `torch.compile`.

    Attributes:
        moved: whether weights were moved: graphs captured before are stale.
    """

    def __init__(self, model: torch.nn.Module, backend: str = "inductor") -> None:
        layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
        # A forward of its own belongs to someone else: a hook that moves weights, for example.
        self._layers = [layer for layer in layers if "forward" not in vars(layer)]
        self._merged = [merged for layer in self._layers for merged in merge(layer)]
        self.moved = any(merged.moved for merged in self._merged)
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
        with ExitStack() as stack:
            for layer, compiled in zip(self._layers, self._compiled, strict=True):
                stack.callback(vars(layer).pop, "forward", None)
                layer.forward = compiled
            for merged in self._merged:
                stack.enter_context(merged)
            with torch._dynamo.config.patch(
                recompile_limit=limit, accumulated_recompile_limit=8 * limit
            ):
                yield
