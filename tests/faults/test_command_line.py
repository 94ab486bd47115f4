"""The command line: help that can be read, options checked before any work, signs of life."""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from eval_helpers import character_tokenizer
from rich.console import Console
from transformers import LlamaConfig
from typer.testing import CliRunner

from oasis_hf.cli import app, page, replays, terminal
from oasis_hf.cli.errors import Failure
from oasis_hf.cli.report import remarks
from oasis_hf.cli.rows import fitted
from oasis_hf.facts import threads
from oasis_hf.tools import lab, needle, packaged
from oasis_hf.tools.lab.texts import text_ids
from oasis_hf_launch import Pulse, wait_quietly

NARROW = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
ROOT = typer.main.get_command(app)
LAYERS, POSITIONS = 3, 4096
BRACKETS = "[/x] [red] [a/b] :smile:"
"""What rich takes for markup: a closing tag of nothing, a colour, a style; and an emoji."""


def every(command: Any = ROOT, name: str = "") -> dict[str, Any]:
    """All commands by their names, those of groups and the groups too."""
    found = {name: command}
    for part, below in getattr(command, "commands", {}).items():
        found |= every(below, f"{name} {part}".strip())
    return found


COMMANDS = every()


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env=NARROW)


def flat(text: str) -> str:
    """Text with its line breaks undone."""
    return " ".join(text.split())


# ---- help --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_eighty_columns_and_names_every_option(runner: CliRunner, command: str) -> None:
    found = runner.invoke(app, [*command.split(), "--help"])
    assert found.exit_code == 0, found.exception
    assert max(map(len, found.output.splitlines())) <= 80
    for option in COMMANDS[command].params:
        assert option.opts[0] in found.output
        assert flat(getattr(option, "help", None) or "") in flat(found.output)


@pytest.mark.parametrize("command", COMMANDS)
def test_brackets_in_help_are_text(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = COMMANDS[command]
    for part in (target, *(x for x in target.params if hasattr(x, "help"))):
        monkeypatch.setattr(part, "help", BRACKETS)
    for name, value in NARROW.items():
        monkeypatch.setenv(name, value)
    # That of the command itself, and of each option but --help, which has its own.
    shown = 1 + sum(bool(getattr(part, "help", None)) for part in target.params)
    ROOT.main([*command.split(), "--help"], standalone_mode=False)
    assert flat(capsys.readouterr().out).count(BRACKETS) == shown


# ---- brackets elsewhere ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--index", BRACKETS],
        ["demo", "--question", BRACKETS],
        ["demo", "--document", BRACKETS],
        ["demo", "--model", BRACKETS],
        ["bench", "--shape", BRACKETS],
        ["bench", "--arms", BRACKETS],
        ["lookahead", "--texts", BRACKETS],
        ["lookahead", "--predictors", BRACKETS],
        ["models", "--filter", BRACKETS],
        ["report", BRACKETS],
        [BRACKETS],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_brackets_in_what_a_user_types_are_echoed(runner: CliRunner, words: list[str]) -> None:
    found = runner.invoke(app, words)
    assert found.exit_code == 2
    assert isinstance(found.exception, SystemExit)
    assert "[/x] [red] [a/b]" in flat(found.output)


def test_consoles_take_text_as_it_is() -> None:
    from rich.table import Table

    shown = terminal.console()
    shown.file = io.StringIO()
    table = Table(BRACKETS, title=BRACKETS)
    table.add_row(BRACKETS)
    shown.print(BRACKETS, table)
    assert shown.file.getvalue().count(BRACKETS) == 4


def test_bars_take_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = on_a_terminal(monkeypatch, lambda work: work.stage(BRACKETS, 2))
    assert BRACKETS in said


def test_every_console_of_the_commands_is_one_without_markup() -> None:
    folder = Path(terminal.__file__).parent
    makes = re.compile(r"\b(Console|Progress|TextColumn|track)\(|from_markup")
    found = {file.name for file in folder.glob("*.py") if makes.search(file.read_text())}
    assert found == {"terminal.py"}


# ---- options before any work -------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights: nothing can load it, so whoever complains did so before."""
    place = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
    ).save_pretrained(place)
    character_tokenizer().save_pretrained(place)
    return place


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights can be loaded."""

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(packaged, "load", load)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)


@pytest.fixture
def unread(idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No text can be read either, and no tokenizer loaded or model converted."""

    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(packaged, "prose", read)
    monkeypatch.setattr(packaged, "smollm2", read)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", read)


ALONE = {
    "demo --budget 0": "--budget: got 0",
    "demo --budget x": "--budget",
    "demo --index keys3bit": "--index: got 'keys3bit', expected one of keys2bit",
    "demo --on-miss guess": "--on-miss: got 'guess', expected 'skip', 'fetch' or",
    "demo --on-miss nan": "--on-miss: got nan",
    "demo --context 9000": "--context and --max-new-tokens: got 9,024 tokens",
    "demo --context 100": "--context",
    "demo --max-new-tokens 1": "--max-new-tokens",
    "demo --question Why?": "--question: got 'Why?' without a document",
    "demo --document .": "--document",
    "demo --model ./none": "--model: got './none', expected a folder with a model",
    "lookahead --texts novels": "--texts: got 'novels', expected some of prose, code, needles",
    "lookahead --texts ,": "--texts: got ','",
    "lookahead --runs fly": "--runs: got 'fly', expected some of right, exit-probe",
    "lookahead --predictors tea": "--predictors: got 'tea', expected some of last",
    "lookahead --predictors last+tea": "--predictors: got 'tea'",
    "lookahead --predictors lru": "--predictors: got 'lru'",
    "lookahead --indexes keys2bit,none": "--indexes: got 'none', expected some of keys2bit",
    "lookahead --budgets 512,x": "--budgets: got 'x', expected tokens",
    "lookahead --budgets 0": "--budgets: got '0'",
    "lookahead --model ./none": "--model: got './none'",
    "lookahead --exit-layers 0": "--exit-layers",
    "lookahead --drafts 32": "--drafts",
    "lookahead --tokens 2": "--tokens",
    "lookahead --context 63": "--context",
    "lookahead --add": "--add: got no file to add to; name it with --out",
    "lookahead --out .": "--out: got ., expected a file",
    "lookahead --out {file}/x": "--out",
    "lookahead --recordings {file}": "--recordings: got {file}, expected a folder",
    "lookahead --add --out {file}": "--out: got {file}, expected a report of this command",
    "bench --budgets x": "--budgets: got 'x'",
    "bench --budgets 0": "--budgets: got '0'",
    "bench --indexes none": "--indexes: got 'none', expected some of keys2bit",
    "bench --policies guess": "--policies: got 'guess', expected skip, fetch or",
    "bench --policies 2": "--policies: got 2.0",
    "bench --block-sizes 3": "--block-sizes: got 3",
    "bench --block-sizes x": "--block-sizes: got 'x'",
    "bench --caps much": "--caps: got 'much'",
    "bench --caps nan": "--caps: got nan",
    "bench --compile maybe": "--compile: got 'maybe'",
    "bench --prompts 10,0": "--prompts: got '0'",
    "bench --acceptance much": "--acceptance: got 'much'",
    "bench --acceptance 2": "--acceptance: got 2",
    "bench --drafts 99": "--drafts: got 99",
    "bench --heat nan": "--heat: got nan",
    "bench --steps 0": "--steps",
    "bench --sizes 8": "--sizes: got '8'",
    "bench --sizes 8x8192 --quick": "--sizes: got '8x8192', expected none beside --quick",
    "bench --arms paged": "--arms: got 'paged', expected some of oasis",
    "bench --arms ,": "--arms: got ','",
    "bench --arms dense --sizes 900x100000": "--arms: got 'dense', expected one that the sizes",
    "bench --shape ./none": "--shape: got './none', expected a folder",
    "bench --out .": "--out: got ., expected a file",
    "models --filter none-such": "--filter: got 'none-such'",
    "models --timeout 0": "--timeout",
    "report nowhere": "nowhere holds no config.json",
    "report nowhere elsewhere --prompts x": "second: got elsewhere",
    "report nowhere --out .": "--out: got ., expected a file",
}
"""Commands that cannot work whatever the model, and what they say; `{file}` is a text file."""


@pytest.mark.parametrize("words", ALONE)
def test_a_wrong_option_is_named_before_anything_is_read(
    runner: CliRunner, unread: None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A short name: of a long value a message shows the beginning.
    monkeypatch.chdir(tmp_path)
    file = Path("notes.txt")
    file.write_text("no report")
    found = runner.invoke(app, shlex.split(words.format(file=file)))
    explained(found, ALONE[words].format(file=file))


STUDIES = {
    "study needles --dtype int8": "study needles: --dtype: got 'int8', expected float32",
    "study needles --policies guess": "on_miss: got 'guess'",
    "study needles --indexes none": "got index 'none'",
    "study needles --options block_size=3": "block_size: got 3",
    "study needles --budgets x": "--budgets: got 'x'",
    "study needles --contexts 100": "--contexts: got '100'",
    "study needles --text none.txt": "--text: got 'none.txt'",
    "study needles --model ./none": "--model: got './none'",
    "study attention --indexes none": "--indexes: got 'none'",
    "study attention --context 300 --steps 400": "--steps: got 400, expected fewer than",
    "study index --indexes none": "--indexes: got index 'none'",
    "study index --budgets 8": "--budgets: got '8'",
    "study index --task hay": "--task: got 'hay', expected one of niah_single_1",
    "study index --text none.txt": "--text: got 'none.txt'",
    "study draft-budget --length 99": "--length",
    "study draft-budget --budgets 0": "--budgets: got '0'",
    "study retrieval-model --device nowhere": "--device: got 'nowhere', expected a device",
    "study retrieval-model --lengths 3": "--lengths: got '3'",
    "study fly": "fly",
    "tables none": "names: got 'none', expected some of",
    "tables --write --check": "--check: got it together with --write",
    "plots --kind gif": "--kind: got 'gif', expected svg or png",
}


@pytest.mark.parametrize("words", STUDIES)
def test_a_wrong_option_of_a_study_is_named_before_any_work(
    runner: CliRunner, idle: None, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("oasis_eval")
    monkeypatch.chdir(tmp_path)
    explained(runner.invoke(app, shlex.split(words)), STUDIES[words])
    assert not list(tmp_path.iterdir())


OF_THE_MODEL = {
    "study needles --contexts 130": "--contexts: got 130: context_tokens: got",
    "study attention --context 5000": "--context: got 5,000 tokens in all",
    "study index --context 5000": "--context: got 5,000 tokens in all, expected at most 4,096",
    "study index --context 130": "--context: niah_multikey_3: got 130, which is too short",
    "demo --context 5000": "--context and --max-new-tokens: got 5,024 tokens in all, expected at",
    "demo --context 130": "--context: got 130, expected room for text beside the question",
    "demo --document {file} --question Why? --context 2000": "--context: got",
    "lookahead --exit-layers 99": "--exit-layers: got 99, expected 1 to 3, the layers",
    "lookahead --context 5000": "--context, --tokens and --drafts: got 5,101 tokens in all",
    "lookahead --texts needles --context 128": "--context: got 128, expected room for text",
    "eval --contexts 5000": "--contexts: got 5000, but the model has 4096",
    "eval --contexts 300 --tasks vt,cwe": "--contexts: cwe: got 300, which is too short",
    "eval --contexts 1024 --tasks language,cwe": "--contexts: cwe: got 1024, which is too short",
    "eval --arms keys2bit/fetch/64/dense_layers=[7]": "dense_layers: got [7], expected numbers",
}
"""What only the model's config or tokenizer tells; its weights are not needed."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", OF_THE_MODEL)
def test_what_does_not_fit_the_model_is_named_before_its_weights_are_loaded(
    runner: CliRunner, idle: None, folder: Path, words: str, tmp_path: Path
) -> None:
    if words.startswith(("eval", "study")):
        pytest.importorskip("datasets")
    file = tmp_path / "notes.txt"
    file.write_text("Some words about nothing. " * 20)
    more = {
        "eval": f"--text {file} --samples 1",
        "lookahead": f"--recordings {tmp_path}",
        "study": f"--out {tmp_path / 'out.json'}",
    }
    command = f"{words} --model {folder} {more.get(words.split()[0], '')}".format(file=file)
    explained(runner.invoke(app, shlex.split(command)), OF_THE_MODEL[words])


EVALUATION = {
    "--preset huge": "--preset: got 'huge', expected one of",
    "--tasks nih": "--tasks: got 'nih'",
    "--contexts 12": "--contexts: got 12, expected 256",
    "--contexts few": "--contexts: got 'few'",
    "--samples 0": "--samples: got 0",
    "--cut 0": "--cut: got 0",
    "--dtype int8": "--dtype: got 'int8'",
    "--arms keys2bit": "--arms: got 'keys2bit'",
    "--arms keys2bit/[/64": "--arms: got '[' in 'keys2bit/[/64'",
    "--arms keys2bit/fetch/64/head_room={{": "--arms: got '{{'",
    "--arms broken_index:Own/fetch/64": "--arms: index 'broken_index:Own' cannot be imported",
    "--arms .x:Own/fetch/64": "--arms: index '.x:Own' cannot be imported",
    "--config none.yaml": "--config: none.yaml cannot be read",
    "--config {binary}": "cannot be read",
    "--text none.txt": "--text: got 'none.txt'",
    "--text {binary}": "is not text in UTF-8",
    "--text {empty}": "holds no text",
    "--text .": "--text: got '.'",
    "--model ./none": "--model: got './none'",
    "--out {empty}": "--out: got {empty}, expected a folder",
    "--out {run}": "--out: got {run}, whose config.json is not that of a run",
    "--batch 0": "--batch",
    "--minutes -1": "--minutes",
    "--threads 0": "--threads",
}


@pytest.mark.parametrize("words", EVALUATION)
def test_a_wrong_option_of_eval_is_named_before_any_work(
    runner: CliRunner, idle: None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_index.py").write_text("this is no Python")
    places = {name: tmp_path / name for name in ("binary", "empty", "run")}
    places["binary"].write_bytes(b"\xff\xfe\x00")
    places["empty"].write_text("")
    places["run"].mkdir()
    (places["run"] / "config.json").write_text("[]")
    found = runner.invoke(app, ["eval", *shlex.split(words.format(**places))])
    explained(found, EVALUATION[words].format(**places))
    assert not (tmp_path / "oasis-eval").exists()


def test_a_folder_of_results_that_are_none_is_named(runner: CliRunner, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for about, samples, message in (
        ("{", "", "config.json is no JSON"),
        ("[]", "", "config.json holds no object"),
        ("{}", "", "holds no results yet"),
        ("{}", "{\n", "samples.jsonl, line 1 is no JSON"),
        ("{}", '{"arm": "dense"}\n', "expected results of"),
    ):
        (tmp_path / "config.json").write_text(about)
        (tmp_path / "samples.jsonl").write_text(samples)
        explained(runner.invoke(app, ["report", str(tmp_path)]), message)


def test_a_recording_that_cannot_be_read_is_named(
    runner: CliRunner, idle: None, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "prose-600.safetensors").write_bytes(b"\x08\x00\x00\x00")
    words = f"--texts prose --context 600 --model {folder} --recordings {tmp_path}"
    found = runner.invoke(app, ["lookahead", *shlex.split(words)])
    explained(found, "--recordings:")
    assert "prose-600.safetensors" in flat(found.output)


def test_a_model_that_the_cache_does_not_serve_is_named(
    runner: CliRunner, idle: None, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    for change, reason in (
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 8},
            "a model that the cache serves; deepseek_v3: multi-head latent attention",
        ),
        ({"model_type": "none-such"}, "a model that Transformers can load"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        found = runner.invoke(app, ["demo", "--model", str(tmp_path)])
        explained(found, f"--model: got '{tmp_path}', expected {reason}")


def test_memory_that_runs_out_is_no_traceback(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate.\nMore.")

    monkeypatch.setattr(importlib.import_module("oasis_hf.cli.demo"), "run", run)
    explained(runner.invoke(app, ["demo"]), "demo: CUDA out of memory", code=1)


def test_a_hub_that_cannot_be_asked_is_not_a_name_that_is_wrong(
    runner: CliRunner, unread: None
) -> None:
    found = runner.invoke(app, ["demo", "--model", "none-such/model"])
    explained(found, "the Hub cannot be asked", code=Failure.code)


def test_other_errors_keep_their_traceback(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(importlib.import_module("oasis_hf.cli.demo"), "run", run)
    assert isinstance(runner.invoke(app, ["demo"]).exception, KeyError)


def explained(found: Any, message: str, code: int = 2) -> None:
    """One line on standard error that says what is wrong, and no traceback."""
    assert isinstance(found.exception, SystemExit), repr(found.exception)
    assert found.exit_code == code, found.output
    # A long path may be broken anywhere.
    assert "".join(message.split()) in "".join(found.stderr.split())
    assert "Traceback" not in found.output
    said = [line for line in found.stderr.splitlines() if line.startswith(("oasis-hf ", "Error"))]
    assert len(said) == 1, found.stderr


# ---- nothing loops on input that cannot fit ----------------------------------------------------


class Joined:
    """A tokenizer by characters whose prompts take more tokens than their parts: `extra` each."""

    def __init__(self, extra: int) -> None:
        self.inner, self.extra = character_tokenizer(), extra
        self.chat_template = ""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        found = self.inner(text, **kwargs)
        if kwargs.get("return_tensors") == "pt" and len(text) > 400:
            more = found.input_ids[:, :1].expand(1, self.extra)
            found["input_ids"] = torch.cat([found.input_ids, more], 1)
        return found

    def decode(self, ids: list[int]) -> str:
        return "".join(self.inner.convert_ids_to_tokens(ids))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("context", [1, 64, 128, 400])
def test_needles_that_do_not_fit_are_an_error(context: int) -> None:
    with pytest.raises(ValueError, match=rf"context: got {context}.*use at least \d+"):
        text_ids("needles", Joined(0), context, 10)


@pytest.mark.timeout(60)
def test_needles_fit_where_the_error_says_so() -> None:
    with pytest.raises(ValueError, match="use at least") as refused:
        text_ids("needles", Joined(0), 128, 10)
    least = int(re.findall(r"use at least (\d+)", str(refused.value))[0])
    ids, context = text_ids("needles", Joined(0), least, 10)
    assert context <= least < len(ids)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("extra", [700, 2000, 100_000])
def test_a_prompt_of_which_nothing_is_left_is_an_error(extra: int) -> None:
    with pytest.raises(ValueError, match=r"context_tokens: got 600.*use at least \d+"):
        needle.fitted_prompt(Joined(extra), 600, "Some text. " * 100, "Why?")


def test_a_prompt_that_is_too_long_joined_is_shortened() -> None:
    ids = needle.fitted_prompt(Joined(250), 600, "Some text. " * 100, "Why?")
    assert 100 < ids.shape[1] <= 600


def test_a_text_that_is_too_short_for_needles_is_not_silently_shorter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oasis_hf.tools.lab.texts.prose", lambda: "A short text. " * 20)
    with pytest.raises(ValueError, match="context: got 5000, expected at most what the text"):
        text_ids("needles", Joined(0), 5000, 10)


@pytest.mark.timeout(60)
def test_words_that_do_not_exist_are_not_searched_for() -> None:
    words = pytest.importorskip("oasis_eval.material.words")
    with pytest.raises(ValueError, match="made_up: got 30"):
        words.made_up(random.Random(0), 30, 1)
    assert len(words.made_up(random.Random(0), 13, 1)) == 13


@pytest.mark.timeout(60)
def test_groups_of_less_than_a_block_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from oasis_hf.index import index_class

    monkeypatch.setattr(index_class("mean"), "group_tokens", classmethod(lambda cls, block: 8))
    with pytest.raises(ValueError, match="index: got 'mean', whose groups have 8 tokens"):
        lab.score(None, None, "mean", {})  # type: ignore[arg-type]


# ---- signs of life -----------------------------------------------------------------------------


def on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[terminal.Work], None], seconds: float = 0.4
) -> str:
    """What a terminal of 80 columns gets while `body` works."""
    file = io.StringIO()
    shown = Console(file=file, force_terminal=True, width=80, markup=False)
    monkeypatch.setattr(terminal, "console", lambda stderr=False: shown)
    with terminal.working("starting") as work:
        body(work)
        time.sleep(seconds)
    return file.getvalue()


def test_a_bar_moves_while_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    said = on_a_terminal(monkeypatch, lambda work: work.stage("one long step"), seconds=1.3)
    assert {"0:00:00", "0:00:01"} <= set(re.findall(r"\d:\d\d:\d\d", said))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
    assert max(map(len, re.split(r"[\r\n]", plain))) <= 80


def test_dots_are_written_without_a_terminal() -> None:
    file = io.StringIO()
    with Pulse(seconds=0.2, file=file) as pulse:
        pulse.say("reading")
        time.sleep(0.9)
        pulse.say("quick", after=5)
        pulse.line("a result")
    assert re.fullmatch(r"reading\.{2,5}\na result\n", file.getvalue())


def test_a_sign_comes_every_three_seconds_at_least() -> None:
    times: list[float] = []

    class Clock(io.StringIO):
        def write(self, text: str) -> int:
            times.append(time.monotonic())
            return len(text)

    start = time.monotonic()
    with Pulse(file=Clock()) as pulse:
        pulse.say("work", after=1.0)
        time.sleep(4)
    gaps = [b - a for a, b in zip([start, *times], [*times, time.monotonic()], strict=False)]
    assert max(gaps) < 3


# ---- what is printed fits ----------------------------------------------------------------------


def test_tables_of_a_report_fit_the_terminal_and_lose_nothing() -> None:
    wide = ["| arm | " + " | ".join(f"a long name {n}" for n in range(9)) + " |"]
    wide += ["| --- " * 10 + "|"]
    for n in (1, 2):
        wide += [f"| `arm {n}` | " + " | ".join(f"{n}{m} (+1 to +9)" for m in range(9)) + " |"]
    text = "\n".join(["# A title", "", "word " * 60, "", *wide, "", "| a | b |", "| - | - |"])
    shown = page.fitted(text, 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert "| a | b |" in shown
    for n in (1, 2):
        for m in range(9):
            assert re.search(rf"a long name {m} +{n}{m} \(\+1 to \+9\)", shown)


def test_lines_of_the_bench_fit_the_terminal() -> None:
    text = "B1   131,072 oasis     2048 keys2bit skip " + "12.5 ms/step (p20), " * 12
    shown = fitted(text, 80)
    assert max(map(len, shown.splitlines())) <= 80 and flat(shown) == flat(text)


def test_tables_of_the_lookahead_fit_the_terminal() -> None:
    row = {
        "text": "needles, greedy",
        "run": "exit-probe",
        "index": "keys2bit",
        "budget": 2048,
        "head_room": 2.0,
        "on_miss": "fetch",
        "fetch_cap": 0.05,
        "predictor": "draft+layer",
        "over_lru": [-0.1234, -0.2234, -0.1034],
        **dict.fromkeys(("recall", "recall_p5", "recall_min", "recall_true", "mass"), 1.0),
        **{"precision": 1.0, "ahead_bytes": 9_999_999, "now_bytes": 0, "behind_bytes": 0},
    }
    shown = Console(file=io.StringIO(), width=80, markup=False)
    replays.show([row], shown)
    lines = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    assert any("draft+layer" in line and "-12.3 [-22.3, -10.3]" in line for line in lines)


def test_the_table_of_models_fits_the_terminal(runner: CliRunner) -> None:
    found = runner.invoke(app, ["models", "--filter", "glm4_moe_lite"])
    assert found.exit_code == 0, found.output
    assert max(map(len, found.stdout.splitlines())) <= 80
    assert "multi-head latent attention caches latents" in flat(found.stdout)


def test_the_demo_says_what_a_cpu_shows_and_why_host_memory_is_large() -> None:
    stats: Any = SimpleNamespace(host_bytes=90, full_kv_bytes=20)
    said = remarks(stats, on_cpu=True)
    assert len(said) == 2 and max(map(len, said)) <= 80
    assert "correctness and memory" in said[0] and "speed" in said[0]
    assert "4,096 tokens" in said[1]
    stats.host_bytes = 20
    assert not remarks(stats, on_cpu=False)


# ---- threads -----------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of threads that are set; nobody has chosen one, and torch would take 64."""
    found: list[int] = []
    for name in (*threads.CHOSEN, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: found[-1] if found else 64)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(threads, "_allowed", lambda: list(range(16)))
    monkeypatch.setattr(threads.psutil, "cpu_count", lambda logical=True: 8)
    monkeypatch.setattr(threads.psutil, "cpu_percent", lambda *a, **k: [100.0] * 13 + [10.0] * 3)
    monkeypatch.setattr(threads, "CGROUPS", Path("/none-such"))
    yield found


def test_threads_that_spin_leave_busy_cores_alone(chosen: list[int]) -> None:
    assert threads.bound_threads() == 3


def test_threads_that_sleep_use_every_physical_core(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert threads.bound_threads() == 8


@pytest.mark.parametrize("files", [{"cpu.max": "250000 100000"}, {"cpu.max": "max 100000"}, {}])
def test_threads_are_those_that_a_container_grants(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if not files:
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000")
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    monkeypatch.setattr(threads, "CGROUPS", tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert threads.bound_threads() == {"250000 100000": 2, "max 100000": 8}.get(
        files.get("cpu.max", ""), 1
    )


@pytest.mark.parametrize("name", threads.CHOSEN)
def test_threads_that_the_user_chose_stay(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "5")
    threads.bound_threads()
    assert not chosen


def test_every_command_bounds_its_threads(runner: CliRunner, chosen: list[int]) -> None:
    runner.invoke(app, ["version"])
    assert chosen == [3]


def test_the_script_has_threads_wait_asleep_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    wait_quietly()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    wait_quietly()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_script_sets_it_before_torch_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, oasis_hf_launch; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
