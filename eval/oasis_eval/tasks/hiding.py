"""Sentences put into a long text at given depths."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = tuple(n / 39 for n in range(40))
"""The depths of RULER: 40, from the start of the text to its end."""
STRIDE = 17
"""Depths from one sample to the next; it shares no factor with 40, so all depths come up."""


def filler(words: int) -> str:
    """The first words of a few sentences that repeat."""
    once = FILLER.split()
    repeats, rest = divmod(words, len(once))
    return " ".join(once * repeats + once[:rest])


def one_depth(draw: Random, number: int) -> float:
    """A depth that differs from sample to sample; 40 samples use each once."""
    del draw
    return DEPTHS[(7 + STRIDE * number) % len(DEPTHS)]


def some_depths(draw: Random, count: int) -> tuple[float, ...]:
    """Depths in ascending order, distinct as long as there are enough."""
    rounds, rest = divmod(count, len(DEPTHS))
    return tuple(sorted([*DEPTHS * rounds, *draw.sample(DEPTHS, rest)]))


def hide(text: str, sentences: Sequence[str], depths: Sequence[float]) -> str:
    """`text` with each sentence put between two sentences of it, next to its depth."""
    starts = [0, *(found.end() for found in re.finditer(r"[.!?]\s+", text)), len(text)]
    parts, before = [], 0
    for sentence, depth in sorted(zip(sentences, depths, strict=True), key=lambda pair: pair[1]):
        cut = min(starts, key=lambda start: abs(start - depth * len(text)))
        parts += [text[before:cut].strip(), sentence]
        before = cut
    parts.append(text[before:].strip())
    return " ".join(part for part in parts if part)


def hidden(
    haystack: Callable[[int], str], sentences: Sequence[str], depths: Sequence[float]
) -> Callable[[int], str]:
    """The body of a draft: `n` words of the haystack around the sentences."""
    return lambda words: hide(haystack(words), sentences, depths)
