"""Share of the reference lines that an answer has, in their order.

An answer's lines that are no references count for nothing; what counts is the longest sequence of
references in the right order. List marks, stars and full stops around a line are left out."""

import re

from oasis_eval.metrics import base


class Score(base.AnswerMetric):
    """Mean share of the lines given in order."""

    def of_one(self, answer: str, references: list[str]) -> float:
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
