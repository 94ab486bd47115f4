"""Another library's answers beside a run: prompts go out, answers come back and are scored."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")

from eval_helpers import TEXT, character_tokenizer, tiny_model
from typer.testing import CliRunner

from oasis_eval.arms import is_peer, named
from oasis_eval.config import resolve
from oasis_eval.peers import files, press
from oasis_eval.peers.answers import merge, write_prompts
from oasis_eval.records import load_run
from oasis_eval.reports.page import write_report
from oasis_eval.runs.run import run
from oasis_hf.cli import app

ARM = "kvpress-snapkv/64"
Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Records]:
    """A run of a tiny model, and its prompts."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("peers")
    (place / "text.txt").write_text(TEXT)
    config = resolve(
        flags={
            "tasks": ["niah_single_2", "ask_again", "language"],
            "contexts": [1300],
            "arms": ["keys2bit/fetch/64"],
            "samples": 2,
            "answer_tokens": 4,
            "text": str(place / "text.txt"),
        }
    )
    run(config, place / "run", None, (tiny_model(), character_tokenizer()))
    count = write_prompts(place / "run", place / "prompts.jsonl", character_tokenizer())
    prompts = press.read_prompts(place / "prompts.jsonl")
    assert count == len(prompts)
    return place / "run", prompts


@pytest.fixture
def folder(made: tuple[Path, Records], tmp_path: Path) -> Path:
    """A copy of the run, to add to."""
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("config.json", "samples.jsonl"):
        (copy / name).write_text((made[0] / name).read_text())
    return copy


@pytest.fixture
def answers(made: tuple[Path, Records], tmp_path: Path) -> Callable[..., Path]:
    """Writes what `oasis_eval.peers` would: the references as answers, or something else."""

    def write(change: dict[str, Any] | None = None, about: dict[str, Any] | None = None) -> Path:
        records = [
            {name: prompt[name] for name in files.PROMPT}
            | {
                "arm": ARM,
                "answers": prompt["references"][0],
                "ids": [1, 2],
                "attended": 65.5,
                "seconds": 0.5,
                "reading": 0.5,
            }
            | (change or {})
            for prompt in made[1]
        ]
        records = [{k: v for k, v in r.items() if v is not None} for r in records]
        out = tmp_path / "answers"
        out.mkdir(exist_ok=True)
        run_about = json.loads((made[0] / "config.json").read_text())
        versions = {"versions": {"kvpress": "0.5.5"}, "date": "2026-01-01"}
        shared = {name: run_about[name] for name in ("model", "dtype")}
        (out / "about.json").write_text(json.dumps(shared | versions | (about or {})))
        (out / "answers.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return out

    return write


# ---- prompts -----------------------------------------------------------------------------------


def test_prompts_are_those_of_the_run_with_one_question_each(made: tuple[Path, Records]) -> None:
    dense = {(r["task"], r["number"]): r for r in load_run(made[0])[1] if r["arm"] == "dense"}
    assert [(p["task"], p["number"]) for p in made[1]] == [("niah_single_2", n) for n in (0, 1)]
    for prompt in made[1]:
        record = dense[prompt["task"], prompt["number"]]
        assert len(prompt["ids"]) == prompt["tokens"] == record["tokens"]
        assert prompt["references"] == record["references"] and prompt["limit"] == 4
        text = character_tokenizer().decode(prompt["ids"]).replace(" ", "")
        assert record["references"][0][0] in text


def test_prompts_of_another_text_are_refused(folder: Path, tmp_path: Path) -> None:
    about = json.loads((folder / "config.json").read_text())
    Path(tmp_path / "other.txt").write_text(TEXT.replace("paragraph", "chapter") * 2)
    about["config"] |= {"text": str(tmp_path / "other.txt"), "seed": 1}
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"text: got .* expected the run's"):
        write_prompts(folder, tmp_path / "prompts.jsonl", character_tokenizer())
    assert not (tmp_path / "prompts.jsonl").exists()


def test_a_run_without_questions_has_no_prompts(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "samples.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["task"] == "language"]
    (folder / "samples.jsonl").write_text("\n".join(kept) + "\n")
    with pytest.raises(ValueError, match=r"run: .* no answers to tasks of one question"):
        write_prompts(folder, tmp_path / "prompts.jsonl", character_tokenizer())


# ---- answers -----------------------------------------------------------------------------------


def test_answers_are_scored_and_shown_beside_dense(
    folder: Path, answers: Callable[..., Path]
) -> None:
    assert [record["score"] for record in merge(folder, answers())] == [1, 1]
    text = write_report(folder).read_text()
    assert f"| `{ARM}` | 100 (100-100) |" in text
    # Against dense attention, which answers nothing here; it has no hits and moves nothing.
    assert f"| `{ARM}` | +100 (+100 to +100) |" in text and "| 66 |  |" in text
    assert "keeps so many tokens per KV head" in text and "kvpress 0.5.5" in text


def test_wrong_answers_score_nothing_and_replace_older_ones(
    folder: Path, answers: Callable[..., Path]
) -> None:
    before = load_run(folder)[1]
    merge(folder, answers())
    merge(folder, answers({"arm": "kvpress-knorm/64"}))
    merge(folder, answers({"answers": ["nothing of it"]}))
    added = load_run(folder)[1][len(before) :]
    assert {(r["arm"], r["score"]) for r in added} == {(ARM, 0), ("kvpress-knorm/64", 1)}
    assert len(added) == 4


def test_a_run_that_goes_on_leaves_them_alone(folder: Path, answers: Callable[..., Path]) -> None:
    log = (folder / "samples.jsonl").read_text()
    merge(folder, answers())
    assert (folder / "samples.jsonl").read_text() == log


@pytest.mark.parametrize(
    ("change", "about", "message"),
    [
        ({"references": [["1"]]}, None, r"answers: .*line 1: got references \[\['1'\]\].*expected"),
        ({"tokens": 7}, None, "got tokens 7 .*write them again from this run"),
        ({"number": 9}, None, "is to niah_single_2 1300 number 9, which the run has not"),
        ({"arm": "snapkv"}, None, "of arm 'snapkv', expected LIBRARY-METHOD/TOKENS"),
        (
            {"ids": None},
            None,
            "line 1 has no ids; expected what `python -m oasis_eval",
        ),
        (None, {"dtype": "bfloat16"}, "got dtype 'bfloat16' .* expected the run's, 'float32'"),
        (None, {"model": "other"}, "got model 'other' .* run `python -m oasis_eval.peers` with it"),
    ],
)
def test_answers_that_do_not_belong_are_refused(
    folder: Path,
    answers: Callable[..., Path],
    change: dict[str, Any] | None,
    about: dict[str, Any] | None,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        merge(folder, answers(change, about))
    assert not (folder / "peers.jsonl").exists()


def test_arms_of_other_libraries_are_told_from_our_own() -> None:
    assert is_peer(ARM) and not is_peer("dense") and not is_peer("keys2bit/fetch/64")
    assert (named(ARM).family, named(ARM).budget) == ("kvpress-snapkv", 64)
    assert named("keys2bit/fetch/64").budget == 64


# ---- the command line --------------------------------------------------------------------------


def test_report_takes_answers_and_says_what_is_wrong(
    folder: Path, answers: Callable[..., Path], tmp_path: Path
) -> None:
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    done = runner.invoke(app, ["report", str(folder), "--peers", str(answers())])
    assert done.exit_code == 0 and f"| `{ARM}` |" in done.output
    for words, message in (
        (["--peers", str(tmp_path)], "holds no answers.jsonl; expected a folder that `python -m"),
        ([str(folder), "--peers", str(tmp_path)], "second: got"),
        (["--peers", str(tmp_path), "--prompts", str(tmp_path / "x")], "peers: got"),
    ):
        done = runner.invoke(app, ["report", str(folder), *words])
        assert done.exit_code == 2 and message in " ".join(done.output.split())


# ---- the side of the other environment ---------------------------------------------------------


def test_it_runs_where_neither_the_library_nor_data_sets_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("oasis_eval")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("oasis_hf", "oasis_kernels", "datasets", "evaluate"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["peers", "--help"])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("oasis_eval.peers", run_name="__main__")
    assert done.value.code == 0 and "--keep" in capsys.readouterr().out


@pytest.mark.parametrize(("length", "keep"), [(2047, 256), (2047, 2046), (100, 1), (131071, 512)])
def test_the_ratio_keeps_just_so_many(length: int, keep: int) -> None:
    assert int(length * (1 - press.ratio(length, keep))) == keep


def test_nothing_is_evicted_where_all_fits() -> None:
    assert press.ratio(500, 512) == 0


@pytest.mark.parametrize(
    ("read", "given", "message"),
    [
        (press.press_names, "snap", "--presses: got 'snap', expected some of snapkv"),
        (press.press_names, "", "--presses: got ''"),
        (press.budgets, "256,x", "--keep: got 'x', expected tokens"),
        (press.budgets, "0", "--keep: got '0'"),
        (press.read_prompts, Path("nowhere"), "--prompts: got nowhere, expected a file; write"),
    ],
)
def test_choices_that_cannot_be_used(read: Any, given: Any, message: str) -> None:
    with pytest.raises(press.InputError, match=message):
        read(given)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("x", "line 1 is no JSON"), ("{}", "line 1 has no task, context")],
)
def test_files_that_hold_no_prompts(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(press.InputError, match=message):
        press.read_prompts(tmp_path / "prompts.jsonl")


def test_a_cache_that_lost_nothing_answers_as_generate_does() -> None:
    """Positions and the last token of the prompt are right."""
    torch.manual_seed(0)
    model = tiny_model()
    model.set_attn_implementation("sdpa")
    from transformers import DynamicCache

    ids = torch.randint(0, 96, (1, 90))
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :-1], past_key_values=cache)
        found = press.decode(model, cache, int(ids[0, -1]), 89, 8, set())
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found == expected[0, 90:].tolist()
