"""Baselines and bounds for evaluation: mean key, sinks and recent tokens, and the oracle."""

import torch
from torch import Tensor

from .base import Index


class MeanKeyIndex(Index):
    """Ranks a block by the mean of its keys. One bit per key element at block 16; weak."""

    name = "mean"

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        """Mean of each block."""
        return {"mean": keys.float().mean(-2).to(keys.dtype)}

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        """Logit of the mean key."""
        return query @ self.arrays["mean"][:, :, :-1].float().transpose(-1, -2)


class StreamingIndex(Index):
    """Always the newest blocks, beside the sinks (as StreamingLLM). Stores nothing."""

    name = "streaming"

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        """Nothing to keep."""
        return {}

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        """The block's number."""
        number = torch.arange(self.capacity, device=query.device, dtype=torch.float32)
        return number.expand(*query.shape[:3], -1)


class OracleIndex(Index):
    """Keeps every key, and so knows the true attention. For evaluation: it saves no memory."""

    name = "oracle"
    estimates_mass = True

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        """The keys themselves."""
        return {"keys": keys}

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        """Log of the block's summed attention."""
        keys = self.arrays["keys"][:, :, :-1].flatten(2, 3).float()
        logits = query @ keys.transpose(-1, -2)
        return torch.logsumexp(logits.unflatten(-1, (-1, self.block)), -1)
