"""Metrics as modules of `evaluate`, which load without a network.

Each file holds one, so that `evaluate.load("…/string_match_all.py")` works too. All give "score",
the mean over answers between 0 and 1, and "scores", one for each answer.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

import evaluate

METRICS = ("string_match_all", "string_match_part", "exact_fields", "line_match")


@cache
def metric(name: str) -> evaluate.Metric:
    """The metric of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in METRICS:
        raise ValueError(f"metric: got {name!r}, expected one of {', '.join(METRICS)}")
    module = import_module(f"{__name__}.{name}")
    found: evaluate.Metric = module.Score(keep_in_memory=True)
    return found


def score(name: str, answer: str, references: list[str]) -> float:
    """What one answer is worth, 0 to 1."""
    return scores(name, [answer], [references])[0]


def scores(name: str, answers: list[str], references: list[list[str]]) -> list[float]:
    """What each answer is worth, 0 to 1; all at once, as a call of `evaluate` takes its time."""
    result = metric(name).compute(predictions=answers, references=references)
    assert result is not None
    return [float(value) for value in result["scores"]]
