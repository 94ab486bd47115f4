"""Verifications of drafts whose acceptance is set, not found: what they would bring.

Random weights agree with no draft. So every round verifies random drafts for real, and keeps as
many of each row as a draft of the given quality would have had accepted. Drafting takes no time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ..cache import OasisCache
from ..generation.decoder import Decoder
from .plan import Case


def kept_tokens(case: Case, generator: torch.Generator) -> Tensor:
    """Tokens that each sequence keeps of one round, `[B]` on the host.

    The newest token, and the drafts before the first that is refused; each is accepted with the
    case's probability.
    """
    draw = torch.rand(case.batch, case.drafts, generator=generator)
    return 1 + (draw < case.acceptance).long().cumprod(1).sum(1)


class DraftRounds:
    """Rounds over a filled cache.

    Args:
        model: whose cache it is.
        case: how many drafts, and how many are accepted.
        cache: holds the case's context.
    """

    def __init__(self, model: LlamaForCausalLM, case: Case, cache: OasisCache) -> None:
        self.case, self.device = case, model.device
        self.words = model.config.vocab_size
        self.decoder = Decoder(model, cache)
        self.generator = torch.Generator().manual_seed(0)
        columns = cache.get_seq_length() + 1
        real = torch.ones(case.batch, columns, dtype=torch.bool, device=self.device)
        self.decoder.read(self._tokens(1), real)

    def _tokens(self, count: int) -> Tensor:
        return torch.randint(1, self.words, (self.case.batch, count), device=self.device)

    def run(self) -> int:
        """One round: verify, wait for what came of it, keep; returns the tokens kept."""
        tokens = self._tokens(1 + self.case.drafts)
        logits = self.decoder.feed(tokens, torch.ones_like(tokens, dtype=torch.bool))
        # A real round learns here what was accepted.
        logits.argmax(-1).cpu()
        kept = kept_tokens(self.case, self.generator)
        self.decoder.commit(torch.full_like(kept, tokens.shape[1]), kept)
        return int(kept.sum())
