"""Choices of a run: precedence, and what is refused by name."""

from pathlib import Path

import pytest

pytest.importorskip("datasets")

from oasis_eval.arms import DENSE, parse
from oasis_eval.config import PRESETS, ConfigError, EvalConfig, resolve
from oasis_eval.tasks import RULER

CONFIGS = sorted((Path(__file__).parents[1] / "eval" / "configs").glob("*.yaml"))


def yaml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_then_preset_then_file_then_flags(tmp_path: Path) -> None:
    file = yaml(tmp_path, "samples: 7\nseed: 3\ntasks: [vt]\n")
    assert resolve().samples == EvalConfig().samples
    assert resolve("tiny").samples == PRESETS["tiny"]["samples"]
    found = resolve("tiny", file, {"seed": 9, "contexts": None})
    assert (found.samples, found.seed, found.tasks) == (7, 9, ("vt",))
    assert found.contexts == (1024,) and found.text == EvalConfig().text


def test_a_file_may_name_the_preset(tmp_path: Path) -> None:
    file = yaml(tmp_path, "preset: ruler\nsamples: 1\n")
    assert resolve(None, file).tasks == tuple(RULER)
    assert resolve("tiny", file).tasks == resolve("tiny").tasks


def test_lists_may_be_written_as_words() -> None:
    found = resolve(flags={"tasks": "vt, cwe", "contexts": "512,1024", "arms": "mean/fetch/64"})
    assert found.tasks == ("vt", "cwe") and found.contexts == (512, 1024)
    assert found.arms == ("dense", "mean/fetch/64")


def test_answers_are_cut_by_task_or_all_alike(tmp_path: Path) -> None:
    by_task = resolve(None, yaml(tmp_path, "answer_tokens: {vt: 8, cwe: 999}\n"))
    assert [by_task.limit(name, 30) for name in ("vt", "cwe", "fwe")] == [8, 30, 30]
    assert resolve(flags={"answer_tokens": 8}).limit("vt", 30) == 8
    assert resolve().limit("vt", 30) == 30


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_the_files_of_the_project_can_be_run(file: Path) -> None:
    # A sample of a long output is thousands of steps, one of a text that is scored a hundred.
    least = {"long-output": 16, "dense-layers": 4}
    assert resolve(None, file).samples >= least.get(file.stem, 100)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_run(preset: str) -> None:
    assert resolve(preset).parsed_arms[0] == DENSE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampels: 3", "sampels: unknown key in .*run.yaml; expected some of .*samples"),
        ("samples: three", "samples: got 'three', expected a whole number"),
        ("samples: 0", "samples: got 0"),
        ("samples: true", "samples: got True"),
        ("tasks: [nih]", "tasks: got 'nih'"),
        ("tasks: []", "tasks: got none"),
        ("contexts: [12]", "contexts: got 12"),
        ("arms: [keys2bit]", "arms: got 'keys2bit', expected dense, or INDEX/MISS/BUDGET"),
        ("arms: [keys2bit/fetch/0]", "budget: got 0"),
        ("arms: [keys3bit/fetch/64]", "got index 'keys3bit'"),
        ("arms: [keys2bit/fetch/64/cap=1]", "got 'cap'"),
        ("arms: ['no.such:Index/fetch/64']", "cannot be imported"),
        ("dtype: int8", "dtype: got 'int8'"),
        ("model: 3", "model: got 3"),
        ("preset: huge", "preset: got 'huge'"),
        ("answer_tokens: 0", "answer_tokens: got 0"),
        ("answer_tokens: {vt: 0}", "answer_tokens: got 0"),
        ("answer_tokens: {nih: 3}", "answer_tokens: got task 'nih'"),
        ("answer_tokens: {vt: few}", "answer_tokens: got 'few'"),
        ("- samples", "holds no keys"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(None, yaml(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(None, tmp_path / "none.yaml")


def test_the_digest_changes_with_every_choice() -> None:
    assert resolve("tiny").digest == resolve("tiny").digest
    assert resolve("tiny").digest != resolve("tiny", flags={"seed": 1}).digest


def test_arms_by_name() -> None:
    arm = parse("keys2bit/0.01/512/fetch_cap=null/head_room=1.0")
    assert arm.options == {
        "index": "keys2bit",
        "on_miss": 0.01,
        "budget": 512,
        "fetch_cap": None,
        "block_size": 16,
        "head_room": 1.0,
    }
    assert (arm.budget, arm.family) == (512, "keys2bit/0.01/fetch_cap=null/head_room=1.0")
    assert parse("keys2bit/skip/512").options["fetch_cap"] == 0.05
    assert parse("keys2bit/fetch/512/block_size=auto").options["block_size"] == "auto"
    assert parse("eval_helpers:Backwards/fetch/64").options["index"].__name__ == "Backwards"
