"""Share of the reference lines that an answer has, in their order.

An answer's lines that are no references count for nothing; what counts is the longest sequence of
references in the right order. List marks, stars and full stops around a line are left out."""

import re
from typing import Any

import datasets
import evaluate


class Score(evaluate.Metric):
    """Mean share of the lines given in order."""

    def _info(self) -> evaluate.MetricInfo:
        strings = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions: answers; references: a list of strings for each",
            features=datasets.Features(
                {"predictions": strings, "references": datasets.Sequence(strings)}
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        scores = [_score(*pair) for pair in zip(predictions, references, strict=True)]
        return {"score": sum(scores) / len(scores), "scores": scores}


def _score(answer: str, references: list[str]) -> float:
    """Share of the lines of one answer."""
    wanted = [_plain(line) for line in references]
    given = [line for line in map(_plain, answer.splitlines()) if line in set(wanted)]
    return _longest(given, wanted) / len(wanted)


def _longest(given: list[str], wanted: list[str]) -> int:
    """Length of the longest common subsequence."""
    best = [0] * (len(wanted) + 1)
    for line in given:
        for place in range(len(wanted), 0, -1):
            if wanted[place - 1] == line:
                best[place] = max(best[place], max(best[:place]) + 1)
    return max(best)


def _plain(line: str) -> str:
    """A line without list marks, emphasis and case."""
    return re.sub(r"^\s*(?:[-*+•]|\d+[.)])\s+|[*`]|[.,;]?\s*$", "", line).strip().lower()
