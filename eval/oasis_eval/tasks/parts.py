"""What a task is made of: turns, drafts that can be filled to any length, and samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from datasets import Features, Sequence, Value


@dataclass(frozen=True)
class Turn:
    """One question about the text.

    Attributes:
        question: what the user asks.
        references: strings that a right answer holds; what they mean is up to the metric.
        lead_in: the start of the answer, given to the model as in RULER; not scored.
    """

    question: str
    references: tuple[str, ...]
    lead_in: str = ""


@dataclass(frozen=True)
class Draft:
    """A sample before it is filled to its length.

    Attributes:
        body: the text with `n` units of what makes it long: words, or items of a list. A longer
            text never has fewer tokens, and the same `n` gives the same text.
        turns: the questions; the last tokens of the text itself are scored where there are none.
        answer_tokens: most tokens of one answer, or how many tokens are scored.
        depths: where the facts are, 0 for the start of the text and 1 for its end.
        fewest: the smallest `n` for which the turns can be answered.
    """

    body: Callable[[int], str]
    turns: tuple[Turn, ...]
    answer_tokens: int
    depths: tuple[float, ...] = ()
    fewest: int = 0


@dataclass(frozen=True)
class Scene:
    """What a task draws from.

    Attributes:
        draw: random numbers of this sample alone.
        number: of the sample in its data set.
        context: tokens of prompt and answers together.
        prose: words of real text, from a place of this sample's own.
    """

    draw: Random
    number: int
    context: int
    prose: Callable[[int], str] = field(repr=False)


@dataclass(frozen=True)
class Task:
    """A kind of sample.

    Attributes:
        make: draws one sample.
        metric: name of the metric that scores an answer; "loss" or "drift" without questions.
        about: one line for people.
    """

    make: Callable[[Scene], Draft]
    metric: str
    about: str


FEATURES = Features(
    {
        "task": Value("string"),
        "number": Value("int64"),
        "context": Value("int64"),
        "tokens": Value("int64"),
        "text": Value("string"),
        "turns": [
            {
                "question": Value("string"),
                "lead_in": Value("string"),
                "references": Sequence(Value("string")),
            }
        ],
        "answer_tokens": Value("int64"),
        "depths": Sequence(Value("float64")),
    }
)
"""Columns of a data set; `tokens` is the length of the first prompt, its lead-in included."""

Sample = dict[str, Any]
"""One row of a data set."""
