"""The check of what an index that is not built in returns as its scores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..config import OasisConfigError

SPILL = (
    "the last entry of every array is the spill, which takes masked-out writes; leave it out, as "
    "in self.arrays[name][:, :, :-1]"
)


def check_scores(index: str, logits: Any, query: Tensor, live: Tensor) -> None:
    """Look at what the `block_logits` of an index returns; waits for the device.

    Args:
        index: name of its class, for messages.
        logits: what it returned.
        query: `[B, H, Q, D]` that it was given.
        live: `[B, 1, N]` likewise.

    Raises:
        OasisConfigError: not `[B, H, Q, N]` float32 numbers or -inf on the query's device.
    """
    label = f"index {index}: block_logits"
    shape = (*query.shape[:3], live.shape[2])
    if not isinstance(logits, Tensor):
        raise OasisConfigError(f"{label}: got a {type(logits).__name__}, expected a tensor")
    if tuple(logits.shape) != shape:
        spill = logits.ndim == 4 and logits.shape[3] > shape[3]
        raise OasisConfigError(
            f"{label}: got {tuple(logits.shape)}, expected {shape}, [batch, heads, query rows, "
            f"blocks]{'; ' + SPILL if spill else ''}"
        )
    if logits.dtype != torch.float32:
        raise OasisConfigError(
            f"{label}: got {logits.dtype}, expected torch.float32; call .float() on the arrays"
        )
    if logits.device != query.device:
        raise OasisConfigError(f"{label}: got {logits.device}, expected {query.device}")
    wrong = logits.isnan() | (logits == math.inf)
    if bool((wrong & live[:, :, None]).any()):
        raise OasisConfigError(
            f"{label}: got NaN or +inf for blocks that hold tokens, expected numbers, or -inf to "
            "leave a block out"
        )
