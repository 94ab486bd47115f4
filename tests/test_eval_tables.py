"""The tables of the pages: what they say of results, and that the pages hold just them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_results import lookahead_results, result_row, results
from typer.testing import CliRunner

from oasis_eval.labels import tools
from oasis_eval.needles.summary import MEANS, summarise
from oasis_eval.tables.bench import bench
from oasis_eval.tables.bench_choices import bench_caps, bench_drafts
from oasis_eval.tables.pages import ROOT, TABLES, rendered
from oasis_hf.cli import app

PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))


def tables(*words: str | Path) -> Any:
    """What `oasis-hf tables` says and returns."""
    wide = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner(env=wide).invoke(app, ["tables", *map(str, words)])


def page(folder: Path, *names: str) -> Path:
    """A page with room for some tables."""
    file = folder / "PAGE.md"
    parts = (f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in names)
    file.write_text("".join(["before\n", *parts, "after\n"]))
    return file


# ---- the pages ---------------------------------------------------------------------------------


def test_the_pages_have_the_tables_of_the_results() -> None:
    ran = tables("--check")
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_every_marked_table_of_a_page_is_checked(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    marked = {name for name in TABLES if f"<!-- {name}:begin -->" in text}
    assert marked == {name for name, table in TABLES.items() if ROOT / table.page == file}
    assert text.count(":begin -->") == len(marked)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_made_from_a_committed_result(name: str) -> None:
    assert rendered(name).startswith(("|", "**", "Wanted blocks"))


def test_tables_are_checked_and_written_by_their_names(tmp_path: Path) -> None:
    for name in ("bench-caps", "bench-lookahead"):
        (tmp_path / f"{name}.json").write_text(json.dumps(lookahead_results()))
    names = ("bench-caps", "bench-drafts")
    where = ["--results", tmp_path, "--page", page(tmp_path, *names)]
    for name in names:
        for option, code in (("--check", 1), ("--write", 0), ("--check", 0)):
            ran = tables(name, *where, option)
            assert ran.exit_code == code, ran.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["needle"], "names: got 'needle', expected some of needles, smollm2-8k"),
        (["needles", "--results", "/no/such"], "results: got /no/such"),
        (["needles", "--check", "--write"], "--check: got it together with --write"),
        (["needles", "--check", "--page", str(ROOT / "LICENSE")], "needles:begin"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(words: list[str], message: str) -> None:
    ran = tables(*words)
    assert ran.exit_code == 2 and message in ran.output


# ---- needles -----------------------------------------------------------------------------------


@pytest.fixture
def needles(tmp_path: Path) -> Path:
    """A summary of made-up answers."""
    counts = dict.fromkeys(MEANS, 0.125) | {"seconds": 1, "together": 1}
    samples = [
        {"context": 400, "arm": arm, "hit": hit} | counts
        for arm, hits in [
            ("dense", [True, True]),
            ("minmax/fetch/32", [False, True]),
            ("keys2bit/fetch/32", [True, True]),
        ]
        for hit in hits
    ]
    names = "device cpus threads model dtype command commit date python"
    about = dict.fromkeys(names.split(), "x")
    about |= {"versions": {"torch": "2", "transformers": "5"}}
    path = tmp_path / "needles.json"
    path.write_text(json.dumps(summarise(about, samples)))
    return path


def test_needles_are_counted_by_index_and_policy(needles: Path, tmp_path: Path) -> None:
    file = page(tmp_path, "needles")
    where = ["needles", "--results", needles, "--page", file]
    assert [tables(*where, option).exit_code for option in ("--check", "--write")] == [1, 0]
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "| 2-bit keys (`keys2bit`) | fetched | 3 | 2/2 |" in text
    assert "| min/max of a block (`minmax`) | fetched | 2 | 1/2 |" in text


def test_commands_of_older_results_are_named_as_they_are_today(needles: Path) -> None:
    made = json.loads(needles.read_text())
    made["about"]["command"] = "python eval/needles.py --rows 16"
    needles.write_text(json.dumps(made))
    said = "`oasis-hf study needles --rows 16` (then `python eval/needles.py`)"
    assert said in tables("needles", "--results", needles).output


def test_versions_are_read_from_results_of_any_age() -> None:
    assert tools({"torch": "2", "triton": "3"}, "torch", "triton") == ["torch 2", "triton 3"]
    assert tools({"versions": {"transformers": "5"}}, "transformers") == ["Transformers 5"]


# ---- the bench ---------------------------------------------------------------------------------


def cells(text: str) -> list[list[str]]:
    """Rows of the Markdown tables in `text`, headers and rules left out."""
    rows = [
        [cell.strip() for cell in row[1:-1].split("|")]
        for row in text.splitlines()
        if row.startswith("|")
    ]
    return [row for row in rows if row[0] not in ("case", "prompt", "---")]


def test_the_table_groups_sizes_and_names_what_differs() -> None:
    text = bench(results())
    rows = cells(text)
    assert [row[:2] for row in rows[:9]] == [
        ["B1, 128K", "oasis, `keys2bit`, skip"],
        ["B1, 128K", "oasis, `keys2bit`, fetch"],
        ["B1, 128K", "oasis, `keys2bit`, skip, budget 512"],
        ["B1, 128K", "oasis, `keys2bit`, skip, compiled"],
        ["B1, 128K", "DynamicCache"],
        ["B1, 128K", "DynamicCache, offloaded"],
        ["B8, 128K", "oasis, `keys2bit`, skip"],
        ["B8, 128K", "oasis, `keys2bit`, skip, compiled"],
        ["B8, 32K", "oasis, `keys2bit`, skip"],
    ]
    assert [row[7] for row in rows[:6]] == [
        *["10.0 x faster"] * 3,
        "14.2 x faster",
        "",
        "50.0 x slower",
    ]
    assert [row[9] for row in rows[:2]] == ["21.0 GB", ""]
    assert rows[9:] == [
        ["131,072", "oasis, first run", "8,192", "30.0 s", "22.0 GB"],
        ["131,072", "DynamicCache", "", "13.0 s", "50.0 GB"],
    ]
    assert "budget 2,048 unless named" in text and "last 2,048 tokens" in text


def test_the_table_of_caps_is_in_their_order() -> None:
    text = bench_caps(lookahead_results())
    assert cells(text) == [
        [
            "B8, 128K",
            "0, no lookahead",
            "0",
            "90.0%",
            "0.0",
            "0.00",
            "8.00",
            "1,000",
            "0.00",
            "1.00",
        ],
        ["B8, 128K", "0.01", "1", "90.0%", "110.0", "2.00", "8.50", "910", "0.50", "1.06"],
        ["B8, 128K", "0.05", "6", "90.0%", "110.0", "2.00", "8.50", "900", "0.50", "1.06"],
        ["B8, 128K", "auto", "13", "90.0%", "110.0", "2.00", "8.50", "890", "0.50", "1.06"],
        [
            *(
                "B8, 128K",
                "fetched before attention",
                "",
                "90.0%",
                "110.0",
                "2.00",
                "8.50",
                "880",
                "0.50",
            ),
            "1.06",
        ],
        ["B1, 128K", "0.05", "6", "90.0%", "110.0", "2.00", "8.50", "100", "", ""],
    ]


def test_the_table_of_drafts_has_plain_decoding_of_the_same_options_beside() -> None:
    text = bench_drafts(lookahead_results())
    assert text.splitlines()[0] == "| case | cap | plain | 4 drafts, 0.8 | 4 drafts, lookup |"
    assert cells(text) == [
        ["B8, 128K", "0.05", "900", "2,700 (3.00 x)", ""],
        ["B8, 128K", "0, no lookahead", "1,000", "", "2,500 (2.50 x)"],
    ]
    assert "keeps of a round: 0.8: 3.4; lookup: 3.4." in text


def test_the_table_of_older_results_has_no_columns_for_what_they_lack() -> None:
    made = results()
    made["rows"] = [result_row(1, 131072), result_row(1, 131072, "dense", ms_p50=17.0)]
    del made["prompts"]
    text = bench(made)
    assert text.splitlines()[0].endswith("| DynamicCache | peak HBM |")
    assert [row[7] for row in cells(text)] == ["2.0 x faster", ""]
    assert "unless" not in text and "prompt" not in text
