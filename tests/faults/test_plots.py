"""Faults of the plots that readers reported, read off the files that the report command writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oasis_hf.cli import app

pytest.importorskip("matplotlib")
pytest.importorskip("datasets")

RESULTS = Path(__file__).parents[2] / "eval" / "results"
SPARSE, TRUE = "keys2bit/fetch", "oracle/fetch"
COMMITTED = sorted(RESULTS.rglob("*.svg"))


def record(arm: str, number: int, score: float, context: int) -> dict[str, Any]:
    """A result of one needle, at one of three depths."""
    shared: dict[str, Any] = {"task": "niah_single_2", "context": context, "number": number}
    shared |= {"tokens": 500, "depths": [(0.1, 0.5, 0.5)[number]], "arm": arm, "score": score}
    shared |= {"ids": [1], "answers": ["x"], "references": [["x"]], "seconds": 1.0, "reading": 1.0}
    shared["hbm_bytes"] = 2e6 if arm == "dense" else 1e6
    if arm != "dense":
        names = "hit_rate fetched_now refused turnover attended"
        shared |= dict.fromkeys(names.split(), 0.25) | {"bytes_per_step": 0.0}
    return shared


@pytest.fixture(scope="module")
def plots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The plots of a run, by name: two arms that are always right, one that never is."""
    folder = tmp_path_factory.mktemp("run")
    scores = {"dense": 1.0, f"{SPARSE}/64": 1.0, f"{SPARSE}/128": 1.0, f"{TRUE}/64": 1.0}
    scores |= {f"{TRUE}/128": 1.0, "streaming/fetch/64": 0.0}
    records = [
        record(arm, number, score, context)
        for context in (512, 1024)
        for arm, score in scores.items()
        for number in range(3)
    ]
    names = ("dtype", "device", "cpus", "threads", "date", "python", "text", "commit")
    about = dict.fromkeys(names, "x") | {"model": "some-model", "versions": {}}
    about["config"] = {"samples": 3, "seed": 0}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    ran = CliRunner().invoke(app, ["report", str(folder)])
    assert ran.exit_code == 0, ran.output
    return {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.svg")}


def words(plot: str) -> list[str]:
    """The texts of a plot."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", plot)


@pytest.mark.parametrize("name", ["budget", "context", "cost", "depth"])
def test_a_plot_that_does_not_say_of_which_model_and_tasks(
    plots: dict[str, str], name: str
) -> None:
    said = " ".join(words(plots[name]))
    assert "some-model" in said and "niah_single_2" in said


def test_points_of_the_cost_without_their_budgets(plots: dict[str, str]) -> None:
    said = words(plots["cost"])
    # Five sparse arms, two costs, two contexts.
    assert said.count("64") == 3 * 4 and said.count("128") == 2 * 4


@pytest.mark.parametrize("name", ["budget", "context", "cost"])
def test_a_marker_that_is_cut_at_an_edge(plots: dict[str, str], name: str) -> None:
    cut = re.findall(r"<g clip-path=[^>]*>\s*(?:<use|<g id)[^>]*>", plots[name])
    assert cut == []


def test_a_map_of_red_and_green_without_numbers(plots: dict[str, str]) -> None:
    said = words(plots["depth"])
    # Six arms, two contexts, right and wrong in the two depths that have samples.
    assert said.count("100") >= 2 * 5 * 2
    assert "streaming/fetch/64" in said


def test_an_empty_cell_that_looks_half_right(plots: dict[str, str]) -> None:
    said = words(plots["depth"])
    assert said.count("none") == 3 * 6 * 2 and "<pattern" in plots["depth"]


def test_curves_that_coincide_under_one_another(plots: dict[str, str]) -> None:
    """The points of two arms that are right everywhere stand at places of their own."""
    used = re.findall(r'<use xlink:href="#(\w+)" x="([\d.]+)" y="([\d.]+)"', plots["budget"])
    lines = {marker for marker, _, _ in used}
    places = {(x, y) for _, x, y in used}
    assert len(lines) >= 3 and len(places) >= 2 * (2 + 2 + 1)
    assert len({width for width in re.findall(r"stroke-width: ([\d.]+)", plots["budget"])}) > 3


@pytest.mark.parametrize("file", COMMITTED, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_a_committed_plot_without_a_name(file: Path) -> None:
    """Of a model, or of the shape whose random weights were timed."""
    said = " ".join(words(file.read_text(encoding="utf-8")))
    about = file.parent / "config.json"
    model = json.loads(about.read_text())["model"] if about.exists() else None
    known = [model] if model else ["SmolLM2-135M-Instruct", "llama-3.1-8b shape"]
    assert any(name in said for name in known)
    if about.exists():
        tasks = json.loads(about.read_text())["config"]["tasks"]
        assert any(task in said for task in tasks)
