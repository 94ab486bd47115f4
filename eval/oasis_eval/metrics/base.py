"""What all metrics share: they score one answer at a time, and give the mean and each score.

The files of the metrics import this module and not the class: `evaluate.load` takes the first
metric that it finds in a file.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate


class AnswerMetric(evaluate.Metric):
    """A metric of answers, each of which has a list of references."""

    def of_one(self, answer: str, references: list[str]) -> float:
        """What one answer is worth, 0 to 1."""
        raise NotImplementedError

    def _info(self) -> evaluate.MetricInfo:
        strings = datasets.Value("string")
        return evaluate.MetricInfo(
            description=str(type(self).__doc__),
            citation="",
            inputs_description="predictions: answers; references: a list of strings for each",
            features=datasets.Features(
                {"predictions": strings, "references": datasets.Sequence(strings)}
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        scores = [self.of_one(*pair) for pair in zip(predictions, references, strict=True)]
        return {"score": sum(scores) / len(scores), "scores": scores}
