"""Share of the references that an answer contains, in any case (RULER's, for retrieval)."""

from oasis_eval.metrics import base


class Score(base.AnswerMetric):
    """Mean share of the references contained."""

    def of_one(self, answer: str, references: list[str]) -> float:
        """Share contained in one answer."""
        text = answer.lower()
        return sum(reference.lower() in text for reference in references) / len(references)
