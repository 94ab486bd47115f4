"""Every tutorial runs, in its `--small` mode and with the packaged model."""

import importlib.util
import runpy
from pathlib import Path

import pytest

from oasis_hf.tools import packaged

FOLDER = Path(__file__).parent.parent / "examples"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(packaged.PACKAGE) is None, reason=packaged.INSTALL_COMMAND
    ),
]


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs an example as a user would, and returns what it prints."""
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"](["--small"])
    return capsys.readouterr().out


def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert "working set" in run("quickstart", capsys)


def test_long_document_qa_reads_the_document_once(capsys: pytest.CaptureFixture[str]) -> None:
    output = run("long_document_qa", capsys)
    assert "48153" in output and "73920" in output


def test_with_drafts_answers_the_same_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    output = run("with_drafts", capsys)
    assert output.count("48153") == 3
    assert output.count("drafts accepted") == 2


def test_batched_drafts_answers_every_question_every_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = run("batched_drafts", capsys)
    assert all(output.count(answer) == 3 for answer in ("48153", "73920", "26481"))
    assert "drafts accepted" in output


def test_write_an_index_lists_every_index(capsys: pytest.CaptureFixture[str]) -> None:
    output = run("write_an_index", capsys)
    assert all(name in output for name in ("mean-spread", "minmax", "keys2bit"))


def test_every_example_is_tested() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    for example in FOLDER.glob("*.py"):
        assert any(name.startswith(example.stem) for name in tested), example.name
