"""Share of the fields of all records that an answer gives exactly, as JSON.

References are JSON objects. Those of the answer are compared with them one by one, in order; values
must be equal, as text without surrounding space. Objects that are cut off or malformed count for
nothing."""

import json
import re
from typing import Any

from oasis_eval.metrics import base


class Score(base.AnswerMetric):
    """Mean share of the fields given exactly."""

    def of_one(self, answer: str, references: list[str]) -> float:
        """Share of the fields of one answer."""
        wanted = [json.loads(reference) for reference in references]
        given = list(_objects(answer))
        right = sum(
            str(found.get(name)).strip() == str(value)
            for record, found in zip(wanted, given, strict=False)
            for name, value in record.items()
        )
        # More records than asked for are no better than missing ones.
        fields = sum(map(len, wanted)) * max(1.0, len(given) / len(wanted))
        return right / fields


def _objects(answer: str) -> list[dict[str, Any]]:
    """The objects of an answer that parse."""
    found = []
    for text in re.findall(r"\{[^{}]*\}", answer):
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found
