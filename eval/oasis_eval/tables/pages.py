"""Where the tables stand: each between two markers of a page, made from one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..records import SUMMARY, read_json
from .accuracy import accuracy
from .bench import bench
from .bench_choices import bench_blocks, bench_caps, bench_drafts
from .lookahead import lookahead
from .needles import mass, needles

ROOT = Path(__file__).resolve().parents[3]
"""The checkout, whose pages these are."""
RESULTS = ROOT / "eval" / "results"


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        render: makes it from a result.
        page: that shows it.
        source: name of the result, if it is not the table's own.
    """

    render: Callable[[dict[str, Any]], str]
    page: str
    source: str = ""


def _page(name: str) -> str:
    """A page of results."""
    return f"docs/results/{name}.md"


TABLES: dict[str, Table] = {
    "needles": Table(needles, _page("accuracy")),
    "smollm2-8k": Table(accuracy, _page("accuracy")),
    "retrieval": Table(accuracy, _page("accuracy")),
    "bench": Table(bench, _page("speed")),
    "bench-caps": Table(bench_caps, _page("background-fetches")),
    "bench-caps-32": Table(bench_caps, _page("background-fetches")),
    "bench-drafts": Table(bench_drafts, _page("drafts"), "bench-lookahead"),
    "lookahead": Table(lookahead, _page("lookahead")),
    "needles-mass": Table(mass, _page("indexes")),
    "smollm2-blocks": Table(accuracy, _page("indexes")),
    "bench-blocks": Table(bench_blocks, _page("indexes")),
}


def rendered(name: str, results: Path = RESULTS) -> str:
    """A table, from its result.

    Args:
        name: one of `TABLES`.
        results: folder of results, or the file of this table's.

    Raises:
        FileNotFoundError: the result is not there.
    """
    path = results
    if results.is_dir():
        path = results / (TABLES[name].source or name)
        path = path / SUMMARY if path.is_dir() else path.with_suffix(".json")
    if not path.is_file():
        raise FileNotFoundError(f"results: got {path}, expected a file with the results of {name}")
    return TABLES[name].render(read_json(path))


def between(text: str, name: str) -> tuple[int, int]:
    """Where in `text` the table `name` begins and ends.

    Raises:
        ValueError: the markers are missing.
    """
    begin, end = f"<!-- {name}:begin -->\n", f"\n<!-- {name}:end -->"
    if begin not in text or end not in text:
        raise ValueError(f"page: expected the lines {begin.strip()} and {end.strip()}")
    return text.index(begin) + len(begin), text.index(end)


def differs(name: str, table: str, page: Path) -> bool:
    """Whether a page has anything but this table between its markers."""
    whole = page.read_text(encoding="utf-8")
    start, end = between(whole, name)
    return whole[start:end] != table


def put(name: str, table: str, page: Path) -> None:
    """Writes a table between its markers."""
    whole = page.read_text(encoding="utf-8")
    start, end = between(whole, name)
    page.write_text(whole[:start] + table + whole[end:], encoding="utf-8")
