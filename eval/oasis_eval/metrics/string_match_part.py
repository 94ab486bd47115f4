"""Whether an answer contains any of its references, in any case (RULER's, for questions)."""

from typing import Any

import datasets
import evaluate


class Score(evaluate.Metric):
    """Share of the answers that contain a reference."""

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
    """1 if one answer contains a reference."""
    text = answer.lower()
    return float(any(reference.lower() in text for reference in references))
