"""The pages say what the code does: figures, commands, options, messages and pictures."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.models import OptionInfo

import oasis_hf
from oasis_hf.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "eval/README.md")),
    *DOCS.rglob("*.md"),
]
RESULTS = ROOT / "eval" / "results"
PICTURES = DOCS / "tools" / "pictures.py"


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def ids(page: Any) -> str | None:
    return page.relative_to(ROOT).as_posix() if isinstance(page, Path) else None


# ---- figures -------------------------------------------------------------------------------------


def rows(text: str) -> list[dict[str, str]]:
    """Rows of all Markdown tables in a text, by column."""
    found: list[dict[str, str]] = []
    header: list[str] = []
    for line in text.splitlines():
        if not line.startswith("| "):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not header:
            header = cells
        elif not set(line) <= set("|-: "):
            found.append(dict(zip(header, cells, strict=True)))
    return found


@pytest.mark.parametrize(
    ("section", "page"), [("Accuracy", "accuracy.md"), ("Speed", "speed.md")], ids=str
)
def test_the_tables_of_the_readme_are_parts_of_generated_ones(section: str, page: str) -> None:
    part = read(ROOT / "README.md").split(f"\n## {section}\n")[1].split("\n## ")[0]
    generated = rows(read(DOCS / "results" / page))
    shown = rows(part)
    assert len(shown) > 4
    for row in shown:
        assert any(row.items() <= other.items() for other in generated), row


def test_the_readme_counts_the_models_that_the_survey_found() -> None:
    text = " ".join(read(ROOT / "README.md").split())
    said = re.search(r"(\d+) of the (\d+) .* classes of Transformers ([\d.]+) are served", text)
    assert said
    path = next(RESULTS.glob(f"models-{said[3]}*.json"))
    models = json.loads(path.read_text())["models"]
    counts = Counter(row["status"] for row in models)
    assert counts["exact"] + counts["delegated in part"] == int(said[1])
    assert len(models) == int(said[2])
    assert not counts["WRONG"]


def test_the_readme_is_short() -> None:
    assert len(read(ROOT / "README.md").splitlines()) <= 150


# ---- commands and files --------------------------------------------------------------------------


def commands(text: str) -> Iterator[str]:
    """Command lines in code: whole lines of shell blocks, and what single backticks hold."""
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        yield from (line.split("  #")[0].strip() for line in lines)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))


OURS = dict.fromkeys(
    part.strip()
    for page in PAGES
    for line in commands(read(page))
    for part in line.split(";")
    if part.strip().startswith("oasis-hf ")
)


def functions(of: typer.Typer) -> dict[str, Any]:
    """What runs for each command, by the words that name it."""
    own = [(one.name, one.callback) for one in of.registered_commands]
    found = {name or callback.__name__: callback for name, callback in own if callback}
    for group in of.registered_groups:
        assert group.typer_instance is not None
        found |= {f"{group.name} {k}": v for k, v in functions(group.typer_instance).items()}
    return found


COMMANDS = functions(app)


def options_of(name: str) -> set[str]:
    """The options of a command of ours, as they are typed."""
    found = set()
    hints = get_type_hints(COMMANDS[name], include_extras=True)
    for parameter in inspect.signature(COMMANDS[name]).parameters.values():
        # typer has an option's names in its annotation or with its default.
        infos = [*get_args(hints[parameter.name])[1:], parameter.default]
        infos = [info for info in infos if isinstance(info, OptionInfo)]
        told = [x for info in infos for x in (info.default, *(info.param_decls or ()))]
        told = [x for x in told if isinstance(x, str) and x.startswith("--")]
        own = f"--{parameter.name.replace('_', '-')}"
        found |= set(told or (own, own.replace("--", "--no-", 1)))
    return found


@pytest.mark.parametrize("line", OURS)
def test_our_commands_have_the_options_that_pages_give_them(line: str) -> None:
    words = shlex.split(line)[1:]
    names = [" ".join(words[:count]) for count in (1, 2)]
    name = next((name for name in names if name in COMMANDS), "")
    assert name or words[0] in {name.split()[0] for name in COMMANDS}, line
    if not name:
        # A group of commands, such as `oasis-hf study`, named as a whole.
        assert len(words) == 1, line
        return
    given = {word for word in words if word.startswith("--")} - {"--help"}
    assert given <= options_of(name), line


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_in_commands_exist(page: Path) -> None:
    # Notes under generated tables may name files of the time when the result was made.
    text = re.sub(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", "", read(page), flags=re.DOTALL)
    files = re.compile(r"(?<![\w/])(?:eval|examples|docs/tools|src|tests)/[\w./-]+\.\w+")
    for line in commands(text):
        for name in files.findall(line):
            if not name.startswith("eval/results/"):
                assert (ROOT / name).exists(), f"{line}: {name}"
        if target := re.fullmatch(r"make ([\w-]+)(?: .*)?", line):
            assert re.search(rf"^{target[1]}:", read(ROOT / "Makefile"), re.MULTILINE), line


# ---- options, errors, stats ----------------------------------------------------------------------


def test_every_option_is_in_the_table_of_what_changes_answers() -> None:
    page = read(DOCS / "guides" / "budget-and-policy.md")
    table = page.split("\n## Which options change answers\n")[1].split("\n## ")[0]
    named = {name for row in rows(table) for name in re.findall(r"`(\w+)`", row["option"])}
    assert named == set(oasis_hf.OasisConfig.fields())


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(read(page) for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: oasis_hf\.(\w+)$", text, re.MULTILINE))
    assert shown == set(oasis_hf.__all__) - {"__version__"}


def messages() -> str:
    """All texts in the code of the library, one a line; what is filled in is an ellipsis."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(
                text(part) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
        return ""

    found = []
    for path in (ROOT / "src" / "oasis_hf").rglob("*.py"):
        nodes = ast.walk(ast.parse(read(path)))
        found += [text(node) for node in nodes if isinstance(node, ast.expr)]
    return "\n".join(dict.fromkeys(found))


def quoted() -> list[str]:
    page = read(DOCS / "reference" / "troubleshooting.md")
    return re.findall(r"^> `(.*)`$", page, re.MULTILINE)


SAID_BY_TRANSFORMERS = {"'past_key_values' is deprecated"}


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    code = messages()
    assert len(quoted()) > 40
    for message in set(quoted()) - SAID_BY_TRANSFORMERS:
        pattern = ".{0,400}?".join(re.escape(part) for part in message.split("…"))
        assert re.search(pattern, code), message


def test_every_kind_of_error_is_in_troubleshooting() -> None:
    page = read(DOCS / "reference" / "troubleshooting.md")
    for name in oasis_hf.__all__:
        if name.endswith("Error"):
            assert f"\n## {name}" in page, name


def test_every_line_of_the_stats_is_explained() -> None:
    page = read(DOCS / "guides" / "stats.md")
    explained = {row["line"] for row in rows(page) if "line" in row}
    source = read(ROOT / "src" / "oasis_hf" / "stats.py")
    body = source.split("def rows(")[1].split("def __str__")[0]
    labels = set(re.findall(r"\(\s*\"([a-zK][\w ]*)\",\s", body))
    assert len(labels) > 8
    assert {f"`{label}`" for label in labels} == explained


def test_reasons_for_eager_steps_are_those_of_the_code() -> None:
    page, code = read(DOCS / "guides" / "stats.md"), messages()
    reasons = [row["reason"].strip("`") for row in rows(page) if "reason" in row]
    assert len(reasons) > 6
    for reason in reasons:
        assert reason in code, reason


# ---- pictures ------------------------------------------------------------------------------------


def test_the_pictures_are_what_the_script_draws() -> None:
    spec = importlib.util.spec_from_file_location("pictures", PICTURES)
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for path, text in pictures.drawn():
        assert read(path) == text, f"{path.name}: run python {PICTURES.relative_to(ROOT)}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_pictures_are_shown_in_both_variants(page: Path) -> None:
    found = re.findall(r"pictures/(\w+)-(\w+)\.svg#gh-(\w+)-mode-only", read(page))
    assert all(palette == mode for _, palette, mode in found)
    for name in {name for name, _, _ in found}:
        assert sorted(palette for other, palette, _ in found if other == name) == ["dark", "light"]
