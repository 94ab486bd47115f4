"""Tables of the study over needles, and of the attention that choices hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..intervals import wilson
from ..labels import index_label, index_order, miss_label, tools
from ..markdown import table
from ..records import Cells

OLDER = {"python eval/needles.py": "oasis-hf study needles"}
"""Commands that results were made by, as they are called now."""


def needles(results: dict[str, Any]) -> str:
    """Hits by index, policy and budget, a table for each context; then what was fetched."""
    parts = []
    for dense in results["dense"]:
        cells = [cell for cell in results["cells"] if cell["context"] == dense["context"]]
        if cells:
            parts += [_hits(dense, cells), _moved(cells)]
    return "\n\n".join([*parts, _note(results)])


def _hits(dense: dict[str, Any], cells: Cells) -> str:
    count = max(cell["of"] for cell in cells)
    title = (
        f"**{dense['context']:,} tokens**: needles answered, of {count} that dense attention "
        f"answers (it answers {dense['hits']} of {dense['of']})."
    )
    header = ["blocks ranked by", "a missing block is", "index bits"]
    rows = (
        [index_label(index), miss_label(on_miss), _bits(found[0])]
        + [
            _cell(found, budget, lambda cell: f"{cell['hits']}/{cell['of']}")
            for budget in _budgets(cells)
        ]
        for (index, on_miss), found in _arms(cells).items()
    )
    return title + "\n\n" + table(header + [f"{b:,}" for b in _budgets(cells)], rows, 2)


def _moved(cells: Cells) -> str:
    title = (
        "Of the wanted blocks, percent fetched before attention + percent fetched after it "
        "(the others were resident, or left out):"
    )
    rows = (
        [index_label(index), miss_label(on_miss)]
        + [
            _cell(found, b, lambda cell: f"{cell['fetched_now']:.1%} + {cell['admitted']:.1%}")
            for b in _budgets(cells)
        ]
        for (index, on_miss), found in _arms(cells).items()
        if index == "keys2bit"
    )
    header = ["blocks ranked by", "a missing block is"]
    return title + "\n\n" + table(header + [f"{b:,}" for b in _budgets(cells)], rows, 2)


def _budgets(cells: Cells) -> list[int]:
    return sorted({cell["budget"] for cell in cells})


def _arms(cells: Cells) -> dict[tuple[str, str], Cells]:
    """Cells by index and policy, in the order of `labels`, fetching first."""
    keys = {(cell["index"], cell["on_miss"]) for cell in cells}
    ranked = sorted(
        keys, key=lambda key: (index_order(key[0]), key[1] == "skip", key[1] != "fetch")
    )
    return {
        key: [cell for cell in cells if (cell["index"], cell["on_miss"]) == key] for key in ranked
    }


def _cell(cells: Cells, budget: int, show: Callable[[dict[str, Any]], str]) -> str:
    return next((show(cell) for cell in cells if cell["budget"] == budget), "")


def _command(about: dict[str, Any]) -> str:
    """The command that made the results, as it is called now; and what it was called then."""
    command: str = about["command"]
    for before, now in OLDER.items():
        if before in command:
            return f"`{command.replace(before, now)}` (then `{before}`)"
    return f"`{command}`"


def _bits(cell: dict[str, Any]) -> str:
    return f"{cell['bits']:g}"


def _note(results: dict[str, Any]) -> str:
    about = results["about"]
    count = max((cell["of"] for cell in results["cells"]), default=0)
    shown = sorted({count, count - 1, count // 2}, reverse=True) if count > 1 else [count]
    ranges = ", ".join(
        "{}/{} {:.0f}-{:.0f} %".format(hits, count, *(100 * x for x in wilson(hits, count)))
        for hits in shown
    )
    machine = about["device"] if about["device"] != "cpu" else f"{about['cpus']}-core CPU"
    return (
        f"95 % intervals (Wilson): {ranges}. {about['model']}, {about['dtype']}, greedy; prompts "
        "are read densely, every decoded token attends sparsely. Budgets are tokens per KV head, "
        "in addition to the tail of the newest ones. Index bits are per key element at 16 bits. "
        f"{_command(about)} at {about['commit']}, {about['date']}: Python {about['python']}, "
        f"{', '.join(tools(about, 'torch', 'transformers'))}, {machine}."
    )


def mass(results: dict[str, Any]) -> str:
    """Share of the true attention held, mean and worst layer, by choice and budget."""
    found: dict[str, dict[int, str]] = {}
    for row in results["choices"]:
        cell = f"{row['mean']:.3f} ({row['worst']:.2f})"
        found.setdefault(row["changes"], {})[row["budget"]] = cell
    budgets = sorted({budget for cells in found.values() for budget in cells})
    lines = ([name, *(cells.get(b, "") for b in budgets)] for name, cells in found.items())
    return table(["choice", *(f"{b:,}" for b in budgets)], lines, 2)
