"""Long outputs: what is the same over arms, what the windows hold, and that drift would be seen."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")

from eval_helpers import TEXT, character_tokenizer, tiny_model

from oasis_eval.config import ConfigError, EvalConfig, resolve
from oasis_eval.records import load_run
from oasis_eval.reports.page import write_report
from oasis_eval.reports.summary import slope
from oasis_eval.runs import drift
from oasis_eval.runs.run import run

FULL, LITTLE, OTHER = "keys2bit/fetch/1024", "streaming/fetch/32", "dense/bfloat16"
STEPS = 32
SMALL = {
    "tasks": ["long_output"],
    "contexts": [300],
    "arms": [FULL, LITTLE, OTHER],
    "samples": 2,
    "answer_tokens": STEPS,
}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return tiny_model(), character_tokenizer()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EvalConfig:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT)
    return resolve(flags=SMALL | {"text": str(text)})


@pytest.fixture(scope="module")
def done(pair: Any, config: EvalConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    out = tmp_path_factory.mktemp("done") / "run"
    run(config, out, None, pair)
    return out


def by_arm(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(record["arm"], []).append(record)
    return found


def test_only_what_leaves_something_out_drifts(done: Path) -> None:
    records = by_arm(load_run(done)[1])
    assert list(records) == ["dense", FULL, LITTLE, OTHER]
    assert all({r["rows"] for r in found} == {2} for found in records.values())
    for true, full, little, other in zip(*records.values(), strict=True):
        assert true["kl"] == 0 and true["agreement"] == 1
        assert true["drift"]["parted"] is None and true["drift"]["steps"] == STEPS
        assert len(true["drift"]["kl"]) == drift.WINDOWS
        # A budget for everything is dense attention, led and let go.
        assert full["kl"] < 1e-6 and full["drift"]["parted"] is None
        assert full["drift"]["free"] == pytest.approx(true["drift"]["free"], abs=1e-3)
        # The newest tokens alone are not; another rounding stands between.
        assert full["kl"] < other["kl"] < little["kl"]
        assert little["drift"]["parted"] is not None
        # Behind a dense reading, the end of the chain is dense attention's own, and what leaves
        # something out differs there by less than with all that it left out before.
        assert true["drift"]["fresh_kl"] < 1e-6 and full["drift"]["fresh_kl"] < 1e-6
        assert 0 < little["drift"]["fresh_kl"] < little["drift"]["kl"][-1]
        assert "fresh_kl" not in other["drift"]
        # Dense attention finds its own output as likely as when it made it.
        assert true["drift"]["free"] == pytest.approx(true["drift"]["loss"], abs=1e-3)


def test_the_report_has_a_table_of_long_outputs(done: Path) -> None:
    page = write_report(done).read_text()
    assert "## Long outputs, 300 tokens with the prompt" in page
    assert f"| `{LITTLE}` |" in page and "Fidelity" not in page
    cells = json.loads((done / "summary.json").read_text())["drift"]
    assert [cell["arm"] for cell in cells] == ["dense", FULL, LITTLE, OTHER]
    little = cells[2]
    more = little["kl"][-1] - little["fresh_kl"]
    assert little["accumulated"]["mean"] == pytest.approx(more) and more > 0
    assert all(row.count("|") == 15 for row in page.splitlines() if row.startswith("| `"))
    assert little["count"] == 2 and little["steps"] == STEPS
    assert little["kl_slope"]["low"] <= little["kl_slope"]["mean"] <= little["kl_slope"]["high"]
    assert little["change"]["mean"] == pytest.approx(
        sum(little["loss"]) / 8 - sum(cells[0]["loss"]) / 8, abs=1e-9
    )


def test_what_is_missing_is_led_along_the_same_output_also_alone(
    pair: Any, config: EvalConfig, done: Path, tmp_path: Path
) -> None:
    copytree(done, tmp_path / "run")
    log = tmp_path / "run" / "samples.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if LITTLE not in line))
    again = by_arm(run(config, tmp_path / "run", None, pair, batch=1))[LITTLE]
    whole = by_arm(load_run(done)[1])[LITTLE]
    assert {record["rows"] for record in again} == {1}
    for one, other in zip(whole, again, strict=True):
        assert one["drift"]["parted"] == other["drift"]["parted"]
        for name in ("kl", "loss", "free", "fresh_kl"):
            assert one["drift"][name] == pytest.approx(other["drift"][name], abs=1e-3)


def test_equal_draws_choose_within_the_nucleus() -> None:
    logits = torch.tensor([0.5, 0.3, 0.16, 0.04]).log().expand(5, -1)
    draw = torch.tensor([0.0, 0.5, 0.53, 0.9, 0.999])
    # The last token is outside: the others hold 0.96 together.
    assert drift.sampled(logits, draw, [])[:, 0].tolist() == [0, 0, 1, 2, 2]
    assert drift.sampled(logits, draw, [0])[:, 0].tolist() == [1, 1, 1, 2, 3]


def test_slopes_are_per_thousand_tokens() -> None:
    assert slope([1.0, 2.0, 3.0, 4.0], 1024) == pytest.approx(1000 / 256)
    assert slope([0.2] * 8, 2048) == pytest.approx(0, abs=1e-9)


def test_another_rounding_is_for_long_outputs() -> None:
    with pytest.raises(ConfigError, match="got 'dense/bfloat16', which only long_output compares"):
        resolve(flags={"tasks": ["long_output", "language"], "arms": [OTHER]})
