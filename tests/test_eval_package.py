"""There is one evaluation: a package that the command line runs, whose commands the pages name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from oasis_hf.cli import app

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "eval" / "oasis_eval"
PAGES = [
    *(ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "Makefile")),
    *(ROOT / "eval" / "README.md", ROOT / "examples" / "write_an_index.py"),
    *sorted((ROOT / "eval" / "configs").glob("*.yaml")),
]
LONGEST = 310
COMMAND = re.compile(r"(?:`|/|^[#\s]*)oasis-hf ([a-z]+)(?: ([a-z][a-z-]+))?", re.MULTILINE)
"""A command between backticks, after a folder, or on a line of its own."""


def commands() -> set[str]:
    """All commands, those of groups with their group's name."""
    found: set[str] = set()
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {f"{name} {part}" for part in inner} if inner else {name}
    return found


def test_all_of_the_evaluation_is_in_the_package() -> None:
    scripts = {file for file in (ROOT / "eval").rglob("*.py") if PACKAGE not in file.parents}
    assert scripts == set()


def test_every_folder_of_the_package_says_what_it_is() -> None:
    for folder in {file.parent for file in PACKAGE.rglob("*.py")}:
        assert (folder / "__init__.py").read_text(encoding="utf-8").startswith('"""')


def test_modules_are_short() -> None:
    lengths = {file: len(file.read_text("utf-8").splitlines()) for file in PACKAGE.rglob("*.py")}
    assert {file: n for file, n in lengths.items() if n > LONGEST} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_commands_that_there_are(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # Where a result says how it was made at its time, that is no command of today.
    text = re.sub(r"\(then `[^`]*`\)", "", text)
    assert "python eval/" not in text and not re.search(r"\beval/[a-z_]+\.py", text)
    known = commands() | {name.split()[0] for name in commands()}
    for first, second in COMMAND.findall(text):
        name = f"{first} {second}" if first == "study" and second else first
        assert name in known, f"{page.name} names oasis-hf {name}"
