"""Prompts with one needle each, in batches of equal length."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oasis_hf.tools.needle import Needle, encode_question, needle_prompt

from ..material import words

MORE = ("Baghdad", "Bangkok", "Dallas", "Frankfurt", "Shanghai")
CITIES = tuple(sorted((*words.CITIES, *MORE)))
LEAD_IN = "The special magic number for {city} mentioned in the provided text is "
"""The start of the answer, given to the model as in RULER: what it decodes is the number.

The space at the end belongs to it. Without, the first token decides between a number, a quote and
"the", which is a near tie on small models and says nothing about retrieval.
"""
NUMBER_TOKENS = 12
"""Tokens in which a number is answered, quotes and such included."""
GOLDEN, SILVER = 0.6180339887, 0.4142135624
"""Steps that spread depths and places evenly, however many needles there are."""


@dataclass(frozen=True)
class Batch:
    """Prompts of equal length.

    Attributes:
        first: number of the first needle.
        needles: the fact in each row.
        ids: `[rows, tokens]`, text and question.
        lead_in: `[rows, tokens]` start of the answer, maybe none.
        limit: most tokens to decode.
    """

    first: int
    needles: tuple[Needle, ...]
    ids: Tensor
    lead_in: Tensor
    limit: int

    @property
    def prompts(self) -> Tensor:
        """`[rows, tokens]`, the start of the answer included."""
        return torch.cat([self.ids, self.lead_in], 1)

    @property
    def tokens(self) -> int:
        """Length of each prompt, the start of the answer included."""
        return self.ids.shape[1] + self.lead_in.shape[1]


class Haystack:
    """Endless numbered needles in one text, the same for one seed.

    Args:
        tokenizer: the model's tokenizer.
        text: prose; every needle's prompt starts at another sentence of it.
        tokens: length of a prompt and its answer; it may be a few shorter.
        seed: of the cities, numbers and places.
        lead_in: whether a prompt ends with the start of the answer.
    """

    def __init__(
        self, tokenizer: Any, text: str, tokens: int, seed: int, lead_in: bool = True
    ) -> None:
        self.tokenizer, self.prompt, self.seed = tokenizer, tokens - NUMBER_TOKENS, seed
        self.text, self.lead_in = text, lead_in
        by_length: dict[int, list[str]] = {}
        for city in CITIES:
            by_length.setdefault(len(self._start(city)), []).append(city)
        # One length, so that the answers of a batch start together.
        self.cities = max(by_length.values(), key=len)

    def _start(self, city: str) -> list[int]:
        text = LEAD_IN.format(city=city)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def needle(self, number: int) -> Needle:
        """Needle `number` of this text."""
        draw = random.Random(f"{self.seed}/{self.prompt}/{number}")
        shift = random.Random(f"{self.seed}/{self.prompt}").random()
        depth = 0.01 + 0.98 * ((shift + number * GOLDEN) % 1)
        return Needle(draw.choice(self.cities), draw.randrange(10_000, 100_000), depth)

    def batch(self, first: int, rows: int) -> Batch:
        """Prompts of needles `first` and on."""
        needles = tuple(self.needle(first + row) for row in range(rows))
        starts = [self._start(needle.city) for needle in needles]
        room = self.prompt - len(starts[0])
        prompts = [self._prompt(first + row, needle, room) for row, needle in enumerate(needles)]
        shortest = min(map(len, prompts))
        header = _common(
            encode_question(self.tokenizer, text, "?")[0].tolist() for text in ("A", "The", "1")
        )
        # Some words at the start of the text go, so that no row needs padding.
        ids = [prompt[:header] + prompt[header + len(prompt) - shortest :] for prompt in prompts]
        texts = ("".join(self.tokenizer.decode(row).split()) for row in ids)
        if any(x.answer not in text for x, text in zip(needles, texts, strict=True)):
            raise ValueError("needle: it stands in the first words of the text, which were cut")
        more = 0 if self.lead_in else len(starts[0])
        given = torch.tensor(starts)[:, : None if self.lead_in else 0]
        return Batch(first, needles, torch.tensor(ids), given, NUMBER_TOKENS + more)

    def _prompt(self, number: int, needle: Needle, room: int) -> list[int]:
        place = int((number * SILVER) % 1 * len(self.text))
        place = self.text.find(". ", place) + 2
        text = f"{self.text[place:]}\n\n{self.text[:place]}"
        return needle_prompt(self.tokenizer, room, needle.depth, needle.city, needle.number, text)[
            0
        ].tolist()


def _common(rows: Any) -> int:
    """How many ids all rows start with."""
    return next(n for n, column in enumerate(zip(*rows, strict=False)) if len({*column}) > 1)
