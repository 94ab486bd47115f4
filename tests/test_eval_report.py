"""Intervals, differences and tables, against numbers worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

from oasis_eval.intervals import bootstrap, paired, stratified
from oasis_eval.records import OVERALL, load_run
from oasis_eval.reports.compare import compare
from oasis_eval.reports.page import write_report
from oasis_eval.reports.summary import summarise
from oasis_eval.runs.fidelity import divergence

SPARSE = "keys2bit/fetch/64"


def record(task: str, number: int, arm: str, score: float, **more: Any) -> dict[str, Any]:
    """A result with everything that a report shows."""
    shared: dict[str, Any] = {
        "task": task,
        "context": 512,
        "number": number,
        "tokens": 500,
        "depths": [0.5],
        "arm": arm,
        "score": score,
        "ids": [1, 2, 3],
        "answers": ["x"],
        "references": [["x"]],
        "seconds": 1.0,
        "reading": 2.0,
    }
    if arm != "dense":
        names = "hit_rate fetched_now refused turnover bytes_per_step attended"
        shared |= dict.fromkeys(names.split(), 0.25)
    return shared | more


RECORDS = [
    *(record("a", n, "dense", 1.0) for n in range(4)),
    *(record("a", n, SPARSE, s) for n, s in enumerate([1.0, 1.0, 0.0, 0.0])),
    *(record("b", n, "dense", s) for n, s in enumerate([1.0, 0.0])),
    *(record("b", n, SPARSE, s, ids=[1, 2, 4]) for n, s in enumerate([1.0, 0.5])),
]


def run_folder(path: Path, records: list[dict[str, Any]], **config: Any) -> Path:
    path.mkdir()
    about = {
        "config": {"samples": 4, "seed": 0} | config,
        "versions": {"torch": "2"},
        **dict.fromkeys(
            ["model", "dtype", "device", "cpus", "threads", "date", "python", "text"], "x"
        ),
        "commit": "abc",
    }
    (path / "config.json").write_text(json.dumps(about))
    (path / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


# ---- intervals ---------------------------------------------------------------------------------


def test_ten_of_twenty_has_the_interval_of_the_binomial() -> None:
    # The 2.5th percentile of Binomial(20, 1/2) is 6, the 97.5th is 14.
    found = bootstrap([1.0] * 10 + [0.0] * 10)
    assert (found.mean, found.low, found.high, found.count) == (0.5, 0.3, 0.7, 20)


def test_two_values_range_from_one_to_the_other() -> None:
    # Both draws give the same value with probability 1/4 each, above 2.5 %.
    found = bootstrap([0.0, 1.0])
    assert (found.mean, found.low, found.high) == (0.5, 0, 1)


def test_equal_values_have_no_width() -> None:
    assert bootstrap([0.25] * 5) == bootstrap([0.25] * 5)
    assert (bootstrap([0.25] * 5).low, bootstrap([0.25] * 5).high) == (0.25, 0.25)


def test_pairs_cancel_what_samples_share() -> None:
    # The scores vary from 0 to 1, their difference does not vary at all.
    found = paired([0.1, 0.5, 0.9], [0.0, 0.4, 0.8])
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))


def test_groups_count_alike_and_are_resampled_apart() -> None:
    found = stratified([[1.0] * 6, [0.0, 1.0]])
    assert (found.mean, found.low, found.high, found.count) == (0.75, 0.5, 1, 8)


@pytest.mark.parametrize(("values", "others"), [([], []), ([1.0], [])])
def test_no_values_and_no_pairs_are_errors(values: list[float], others: list[float]) -> None:
    with pytest.raises(ValueError, match="values: got"):
        paired(values, others)


def test_where_answers_part() -> None:
    assert divergence([1, 2, 3], [1, 2, 4]) == 2
    assert divergence([1, 2], [1, 2, 4]) is None


# ---- summaries ---------------------------------------------------------------------------------


def test_cells_and_paired_differences() -> None:
    cells = {(c["task"], c["arm"]): c for c in summarise(RECORDS)["scores"]}
    assert cells["a", SPARSE]["mean"] == 0.5
    # (0, 0, -1, -1): no draw of four is below -1 or above 0.
    assert cells["a", SPARSE]["change"] == {"mean": -0.5, "low": -1.0, "high": 0.0, "count": 4}
    assert cells["b", SPARSE]["change"]["mean"] == 0.25
    assert "change" not in cells["a", "dense"]
    assert (cells["a", SPARSE]["same"], cells["b", SPARSE]["same"]) == (1, 0)
    assert cells["b", SPARSE]["first_divergence"] == 2


def test_tasks_count_the_same_however_many_samples_they_have() -> None:
    cells = {(c["task"], c["arm"]): c for c in summarise(RECORDS)["scores"]}
    # (1 + 1/2) / 2 and (1/2 + 3/4) / 2, where a mean over all six samples gives 5/6 and 7/12.
    assert cells[OVERALL, "dense"]["mean"] == pytest.approx(0.75)
    assert cells[OVERALL, SPARSE]["mean"] == pytest.approx(0.625)
    assert cells[OVERALL, SPARSE]["change"]["mean"] == pytest.approx(-0.125)


def test_an_arm_that_was_asked_some_of_the_tasks_has_no_mean_over_all() -> None:
    half = [record("a", n, "minmax/fetch/64", 1.0) for n in range(4)]
    arms = {
        cell["arm"] for cell in summarise([*RECORDS, *half])["scores"] if cell["task"] == OVERALL
    }
    assert arms == {"dense", SPARSE}


def test_samples_that_dense_lacks_are_not_compared() -> None:
    cells = summarise([r for r in RECORDS if (r["arm"], r["number"]) != ("dense", 0)])["scores"]
    cell = next(c for c in cells if (c["task"], c["arm"]) == ("a", SPARSE))
    assert (cell["count"], cell["change"]["count"]) == (4, 3)
    assert cell["change"]["mean"] == pytest.approx(-2 / 3)


# ---- pages -------------------------------------------------------------------------------------


def test_the_report_shows_scores_and_differences(tmp_path: Path) -> None:
    text = write_report(run_folder(tmp_path / "run", RECORDS)).read_text()
    assert "| `dense` | 100 (100-100) | 50 (0-100) |" in text
    assert f"| `{SPARSE}` | -50 (-100 to +0) | +25 (+0 to +50) |" in text
    assert (tmp_path / "run" / "summary.json").exists()


def test_plots_of_budgets_and_depths(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = run_folder(tmp_path / "run", RECORDS)
    text = write_report(folder).read_text()
    for name in ("budget.svg", "depth.svg"):
        assert (folder / name).stat().st_size > 1000 and name in text


def test_plots_of_contexts_costs_and_layers(tmp_path: Path) -> None:
    """Where there are several contexts, memory was counted, and a selection was replayed."""
    pytest.importorskip("matplotlib")
    records = [
        r | {"context": context, "hbm_bytes": 2e6 if r["arm"] == "dense" else 1e6}
        for r in RECORDS
        for context in (512, 1024)
    ]
    forced = record("language", 0, SPARSE, 0, mass_by_layer=[0.9, 0.8], recall_by_layer=[1, 0.5])
    del forced["score"]
    names = ("loss", "kl", "kl_max", "agreement", "mass", "mass_min_layer", "recall", "recall_p5")
    forced |= dict.fromkeys((*names, "recall_min"), 0.5) | {"first_divergence": None}
    folder = run_folder(tmp_path / "run", [*records, forced])
    text = write_report(folder).read_text()
    for name in ("context.svg", "cost.svg", "layers.svg"):
        assert (folder / name).stat().st_size > 1000 and f"({name})" in text
    assert "| moved per step | fast memory |" in text and " 1.0 MB |" in text
    # Some results of an older release, which did not count it.
    del records[0]["hbm_bytes"]
    older = write_report(run_folder(tmp_path / "older", records)).read_text()
    assert "context.svg" in older and "layers.svg" not in older


def test_two_runs_are_compared_sample_by_sample(tmp_path: Path) -> None:
    better = [r | {"score": 1.0} for r in RECORDS]
    first = run_folder(tmp_path / "first", RECORDS)
    second = run_folder(tmp_path / "second", better, seed=1)
    text = compare(first, second)
    assert f"| a | 512 | `{SPARSE}` | 50.0 | 100.0 | +50.0 (+0.0 to +100.0) | 4 |" in text
    assert "- seed: 0 and 1" in text


def test_other_samples_are_not_paired(tmp_path: Path) -> None:
    other = [r | {"references": [["y"]]} for r in RECORDS]
    text = compare(run_folder(tmp_path / "a", RECORDS), run_folder(tmp_path / "b", other))
    assert f"| a | 512 | `{SPARSE}` | 50.0 | 50.0 |  | 0 |" in text
    assert "They were made alike." in text


def test_folders_without_a_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no config"):
        load_run(tmp_path)
    left = run_folder(tmp_path / "a", RECORDS[:1])
    right = run_folder(tmp_path / "b", [RECORDS[0] | {"task": "c"}])
    with pytest.raises(ValueError, match="share no task"):
        compare(left, right)
