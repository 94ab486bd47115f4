"""Which drafts are accepted, and the token behind them: for all rows of a round at once.

Sampling follows Leviathan et al. 2023 (arXiv 2211.17192): a draft x is accepted with probability
min(1, p(x) / q(x)), the first that is not is replaced by a sample of norm(max(p - q, 0)), and one
more token is sampled where all are accepted. What comes out is distributed as p, whatever q is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens.

    Attributes:
        tokens: `[B, k]`.
        counts: `[B]` how many of them are drafts; the others only fill up.
        probabilities: `[B, k, V]` that they were sampled from; None if they were chosen outright.
    """

    tokens: Tensor
    counts: Tensor
    probabilities: Tensor | None = None

    @classmethod
    def none(cls, like: Tensor) -> Drafts:
        """No drafts, for token ids like `[B, ...]`."""
        return cls(like.new_zeros(like.shape[0], 0), like.new_zeros(like.shape[0]))

    @property
    def length(self) -> int:
        """k."""
        return self.tokens.shape[1]


def choose(scores: Tensor, drafts: Drafts, sample: bool) -> tuple[Tensor, Tensor]:
    """Accept drafts, and choose the token behind the accepted ones.

    Args:
        scores: `[B, k + 1, V]` processed logits of the model, before the first draft and behind
            each.
        drafts: what was proposed.
        sample: whether to sample; otherwise the best token is chosen.

    Returns:
        tokens `[B, k + 1]`, of which the first `accepted + 1` of a row count, and accepted `[B]`.
    """
    return _sample(scores.softmax(-1), drafts) if sample else _greedy(scores, drafts)


def _greedy(scores: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    best = scores.argmax(-1)
    return best, _leading(best[:, :-1] == drafts.tokens, drafts)


def _leading(right: Tensor, drafts: Drafts) -> Tensor:
    """Drafts before the first that is wrong: right `[B, k]`, to `[B]`."""
    number = torch.arange(drafts.length, device=right.device)
    return (right & (number < drafts.counts[:, None])).long().cumprod(1).sum(1)


def _sample(p: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    """The speculative sampling rule, for probabilities p `[B, k + 1, V]`."""
    chosen = drafts.tokens[..., None]
    p_draft = p[:, :-1].gather(2, chosen).squeeze(2)
    q = drafts.probabilities
    q_draft = torch.ones_like(p_draft) if q is None else q.gather(2, chosen).squeeze(2)
    accepted = _leading(torch.rand_like(p_draft) * q_draft < p_draft, drafts)
    behind = p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[2])).squeeze(1)
    if drafts.length:
        last = accepted.clamp(max=drafts.length - 1)[:, None]
        rest = (behind - _proposal(drafts, last, behind)).clamp(min=0)
        # A rejected draft has p < q, so something is left over; only rounding can take all of it.
        refused = (accepted < drafts.counts)[:, None] & (rest.sum(1, keepdim=True) > 0)
        behind = torch.where(refused, rest, behind)
    tokens = torch.cat([drafts.tokens, drafts.tokens.new_zeros(p.shape[0], 1)], 1)
    return tokens.scatter(1, accepted[:, None], torch.multinomial(behind, 1)), accepted


def _proposal(drafts: Drafts, number: Tensor, like: Tensor) -> Tensor:
    """q `[B, V]` of draft `number` `[B, 1]`."""
    if drafts.probabilities is None:
        token = drafts.tokens.gather(1, number)
        return torch.zeros_like(like).scatter(1, token, 1.0)
    index = number[..., None].expand(-1, 1, like.shape[1])
    return drafts.probabilities.gather(1, index).squeeze(1)
