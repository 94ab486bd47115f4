"""Share of the references that an answer contains, in any case (RULER's, for retrieval)."""

from typing import Any

import datasets
import evaluate


class Score(evaluate.Metric):
    """Mean share of the references contained."""

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
    """Share contained in one answer."""
    text = answer.lower()
    return sum(reference.lower() in text for reference in references) / len(references)
