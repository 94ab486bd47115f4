"""How close an arm stays to dense attention on given tokens, whatever it would answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oasis_hf.config import OasisConfig

from ..arms import Arm
from .replay import Layer, Replayed, everything, replay
from .session import Session, feed

REPLAYED = 32
"""Last tokens for which the selection is replayed."""


def forced(session: Session, cache: Any, ids: Tensor) -> Tensor:
    """Logits `[T, vocabulary]` of one step after another over the given `ids` `[1, T]`."""
    return torch.cat([feed(session.model, cache, token) for token in ids.split(1, 1)])


def loss(logits: Tensor, targets: Tensor) -> float:
    """Mean cross-entropy in nats: logits `[T, vocabulary]`, targets `[T]`."""
    return torch.nn.functional.cross_entropy(logits.float(), targets.to(logits.device)).item()


def closeness(logits: Tensor, dense: Tensor) -> dict[str, float | None]:
    """Kullback-Leibler divergence from dense in nats, greedy agreement, and where they part.

    Args:
        logits: `[T, vocabulary]` of an arm.
        dense: the same of dense attention.
    """
    p, q = dense.float().log_softmax(-1), logits.float().log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    same = p.argmax(-1) == q.argmax(-1)
    parted = None if bool(same.all()) else int((~same).int().argmax())
    return {
        "kl": divergence.mean().item(),
        "kl_max": divergence.max().item(),
        "agreement": same.float().mean().item(),
        "first_divergence": parted,
    }


def divergence(ids: list[int], dense: list[int]) -> int | None:
    """The first place where two answers differ; None if one begins with the other."""
    pairs = zip(ids, dense, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


def selection(layers: list[Layer], arm: Arm) -> dict[str, Any]:
    """Attention mass held and top-K recall over layers, heads and the last tokens, and by layer."""
    config = OasisConfig(**arm.options)
    newest: list[Layer] = [(q[:, -REPLAYED:], k, scale) for q, k, scale in layers]
    parts = [
        everything(layer) if number in config.dense_layers else replay(layer, config)
        for number, layer in enumerate(newest)
    ]
    mass, recall = (_all(parts, name) for name in ("mass", "recall"))
    return {
        "mass": mass.mean().item(),
        "mass_min_layer": min(part.mass.mean().item() for part in parts),
        "recall": recall.mean().item(),
        "recall_p5": recall.quantile(0.05).item(),
        "recall_min": recall.min().item(),
        "mass_by_layer": [round(part.mass.mean().item(), 5) for part in parts],
        "recall_by_layer": [round(part.recall.mean().item(), 5) for part in parts],
    }


def _all(parts: list[Replayed], name: str) -> Tensor:
    return torch.cat([getattr(part, name).flatten() for part in parts])
