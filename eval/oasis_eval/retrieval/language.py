"""A small language of facts in noise: its words, its tokenizer, and batches to train on.

A fact is a key, its four values and an end: "k0007 v0130 v0002 v0421 v0077 <end>". Words of noise
are between facts. "? k0007" asks, and the values and the end are to follow: each answer takes
several steps, each of which has to find its place in the whole context again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

END, ASK = "<end>", "?"
KEYS, VALUES, NOISE = 768, 1024, 128
LENGTH = 4
"""Values of a fact."""
CELL = LENGTH + 2
"""Tokens of a fact, and of as much noise."""
QUERY = LENGTH + 4
"""Tokens of a question with its answer: noise, "?", key, values, end."""


@dataclass(frozen=True)
class Words:
    """How many words there are of each kind; ids in this order: end, "?", keys, values, noise."""

    keys: int = KEYS
    values: int = VALUES
    noise: int = NOISE

    @property
    def first_value(self) -> int:
        """Id of the first value."""
        return 2 + self.keys

    @property
    def first_noise(self) -> int:
        """Id of the first word of noise."""
        return self.first_value + self.values

    @property
    def count(self) -> int:
        """Words in all."""
        return self.first_noise + self.noise

    def list(self) -> list[str]:
        """All words by id."""
        kinds = (("k", self.keys), ("v", self.values), ("w", self.noise))
        return [END, ASK, *(f"{kind}{n:04d}" for kind, count in kinds for n in range(count))]


def fact(key: str, values: list[str]) -> str:
    """A fact as text."""
    return " ".join([key, *values, END])


def question(key: str) -> str:
    """What asks for the values of a key."""
    return f"{ASK} {key}"


def tokenizer(words: Words) -> Any:
    """One token for each word, split at white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words.list())}, unk_token=ASK)
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, padding_side="left")


@dataclass(frozen=True)
class Batch:
    """Sequences with questions at their end.

    Attributes:
        ids: `[B, L]` tokens.
        positions: `[B, L]` ascending.
        asked: `[B, Q, 5]` places from whose outputs the values and the end are predicted.
        answers: `[B, Q, 5]` what is right there.
    """

    ids: Tensor
    positions: Tensor
    asked: Tensor
    answers: Tensor


def draw(
    words: Words,
    rows: int,
    length: int,
    facts: int,
    queries: int,
    generator: torch.Generator,
    span: int = 0,
) -> Batch:
    """Draws sequences of facts in noise, and questions about as many distinct facts as there fit.

    Args:
        words: the vocabulary.
        rows: B.
        length: L.
        facts: in each sequence; fewer where they do not fit.
        queries: Q; no fact is asked for twice.
        generator: random numbers; its device is where all is made.
        span: positions are spread over so many, by skips at a few places (PoSE, Zhu et al. 2023):
            distances of long contexts from short sequences. 0 for natural positions.
    """
    device = generator.device
    # The first cell is noise, for a fact at the very start has nothing before it to be told by; one
    # more is given up so that facts may begin at any place, and are whole.
    cells = (length - QUERY * min(queries, facts)) // CELL - 2
    facts = min(facts, cells, words.keys)
    queries = min(queries, facts)
    left = length - queries * QUERY

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, (rows, *shape), generator=generator, device=device)

    def chosen(among: int, count: int) -> Tensor:
        """Distinct numbers, in random order."""
        order = torch.rand(rows, among, generator=generator, device=device)
        return order.topk(count, -1).indices

    haystack = words.first_noise + random(words.noise, left)
    cells, turn = left // CELL - 2, CELL + random(CELL, 1)
    order, keys = chosen(cells, cells), 2 + chosen(words.keys, facts)
    place, empty = turn + order[:, :facts] * CELL, turn + order[:, facts:] * CELL
    values = words.first_value + random(words.values, facts, LENGTH)
    ends = torch.zeros(rows, facts, 1, dtype=torch.long, device=device)
    told = torch.cat([keys[..., None], values, ends], -1)
    target = place[..., None] + torch.arange(CELL, device=device)
    haystack.scatter_(1, target.flatten(1), told.flatten(1))
    # The rows of `chosen` are in random order: the first facts are as good as any.
    asked = told[:, :queries]
    lead = words.first_noise + random(words.noise, queries, 1)
    questions = torch.cat([lead, torch.ones_like(lead), asked], -1)
    ids = torch.cat([haystack, questions.flatten(1)], 1)
    begin = left + QUERY * torch.arange(queries, device=device)[:, None] + 2
    predicted = (begin + torch.arange(LENGTH + 1, device=device)).expand(rows, -1, -1)
    positions = skipping(empty, length, span, generator)
    return Batch(ids, positions, predicted, asked[..., 1:])


def skipping(empty: Tensor, length: int, span: int, generator: torch.Generator) -> Tensor:
    """Positions `[B, length]`: contiguous but for a few skips, within `span`.

    A skip is followed by noise of a fact's length: what a fact is told by stays together.

    Args:
        empty: `[B, E]` places without facts, in random order; without any nothing is skipped.
        length: of the sequences.
        span: of the positions.
        generator: random numbers.
    """
    rows, device = len(empty), generator.device
    natural = torch.arange(length, device=device).expand(rows, -1)
    where = empty[:, : min(16, 1 + length // 128)]
    shape = where.shape
    if span <= length or not shape[1]:
        return natural
    share = torch.rand(shape, generator=generator, device=device)
    # Between one large skip and many even ones.
    power = 8 * torch.rand(rows, 1, generator=generator, device=device)
    share = share**power
    total = (span - length) * torch.rand(rows, 1, generator=generator, device=device)
    size = (share / share.sum(-1, keepdim=True) * total).long()
    skips = torch.zeros(rows, length, dtype=torch.long, device=device).scatter_add(1, where, size)
    return natural + skips.cumsum(1)
