"""The metrics, against scores counted by hand."""

from pathlib import Path

import pytest

pytest.importorskip("evaluate")

import evaluate

import oasis_eval.metrics
from oasis_eval.metrics import METRICS, metric, score

RECORDS = ['{"order": 1, "city": "Rome"}', '{"order": 2, "city": "Oslo"}']


@pytest.mark.parametrize(
    ("name", "answer", "references", "wanted"),
    [
        ("string_match_all", "It is AB, and cd.", ["ab", "CD"], 1),
        ("string_match_all", "It is ab.", ["ab", "cd"], 0.5),
        ("string_match_all", "", ["ab"], 0),
        ("string_match_part", "It is cd.", ["ab", "cd"], 1),
        ("string_match_part", "It is ef.", ["ab", "cd"], 0),
        (
            "exact_fields",
            '[{"order": 1, "city": "Rome"}, {"order": "2", "city": "Oslo"}]',
            RECORDS,
            1,
        ),
        ("exact_fields", '{"order": 1, "city": "Paris"}', RECORDS, 0.25),
        ("exact_fields", '{"order": 1, "city": "Rome"} {"order": 2, "ci', RECORDS, 0.5),
        ("exact_fields", '{"order": 2, "city": "Oslo"}', RECORDS, 0),
        ("exact_fields", "\n".join([*RECORDS, *RECORDS]), RECORDS, 0.5),
        ("exact_fields", "none", RECORDS, 0),
        ("line_match", "Here:\n- a: 1\n2. **b: 2**.", ["a: 1", "b: 2"], 1),
        ("line_match", "b: 2\na: 1", ["a: 1", "b: 2"], 0.5),
        ("line_match", "a: 1\nx: 9\nc: 3", ["a: 1", "b: 2", "c: 3"], 2 / 3),
        ("line_match", "a: 1\na: 1", ["a: 1", "b: 2"], 0.5),
    ],
)
def test_scores(name: str, answer: str, references: list[str], wanted: float) -> None:
    assert score(name, answer, references) == pytest.approx(wanted)


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_modules_that_load_without_a_network(name: str) -> None:
    path = Path(oasis_eval.metrics.__file__).parent / f"{name}.py"
    loaded = evaluate.load(str(path))
    answers, references = ['{"a": 1}', "no"], [['{"a": 1}'], ['{"a": 2}']]
    result = loaded.compute(predictions=answers, references=references)
    assert result == {"score": 0.5, "scores": [1, 0]}


def test_an_unknown_metric_is_named() -> None:
    with pytest.raises(ValueError, match="got 'bleu'"):
        metric("bleu")
