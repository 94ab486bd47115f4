"""Whether an answer contains any of its references, in any case (RULER's, for questions)."""

from oasis_eval.metrics import base


class Score(base.AnswerMetric):
    """Share of the answers that contain a reference."""

    def of_one(self, answer: str, references: list[str]) -> float:
        """1 if one answer contains a reference."""
        text = answer.lower()
        return float(any(reference.lower() in text for reference in references))
