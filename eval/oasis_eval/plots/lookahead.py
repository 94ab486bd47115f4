"""Wanted blocks that are resident in time, by predictor."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..records import Cells
from .layers import EVERY
from .style import DASHES, entitle, figure_of, legend, looks

RUNS = {"right": "one token a step", "lookup": "prompt lookup"}
SHOWN = ("lru", "last", "draft", "layer", "oracle")
"""From the line that is drawn first, and widest, to the one above it."""
TEXTS = {"code": "the standard library's source", "prose": "Python's language reference"}
HEAD_ROOM, CAP = 2.0, 0.05
"""The slots of the first plot, and the cap of the second."""


def lookahead_layers(results: dict[str, Any]) -> Figure:
    """Recall by layer: a line per predictor, a panel per kind of generation."""
    rows = [row for row in _default_index(results) if row["on_miss"] == "fetch"]
    rows = [row for row in rows if (row["head_room"], row["fetch_cap"]) == (HEAD_ROOM, None)]
    budget = min(row["budget"] for row in rows)
    rows = [row for row in rows if row["budget"] == budget and row["text"] == rows[0]["text"]]
    look = looks(SHOWN, by_index=False)
    figure, panels = _panels(rows)
    for run, axes in panels:
        for number, name in enumerate(SHOWN):
            for row in rows:
                if (row["run"], row["predictor"]) == (run, name):
                    recall = [100 * x for x in row["recall_by_layer"]]
                    every = (number, EVERY)
                    axes.plot(recall, label=name, markevery=every, **look[name].line())
        axes.set(title=RUNS[run], xlabel="layer")
    _entitle(
        figure,
        results,
        rows,
        f"budget {budget:,}, {HEAD_ROOM * budget:,.0f} tokens of slots, no cap",
        "Lines that coincide lie on one another, the wider ones below.",
    )
    legend(figure, 6)
    return figure


def lookahead_head_room(results: dict[str, Any]) -> Figure:
    """Recall over slots, at the default cap: a line per predictor, a panel per generation."""
    rows = [row for row in _default_index(results) if row["on_miss"] == "fetch"]
    rows = [row for row in rows if row["text"] == rows[0]["text"]]
    budgets = sorted({row["budget"] for row in rows})
    look = looks(SHOWN, 0.03, by_index=False)
    figure, panels = _panels(rows)
    for run, axes in panels:
        for name in SHOWN:
            for budget, dashes in zip(budgets, cycle(DASHES), strict=False):
                points = sorted(
                    (row["head_room"], 100 * row["recall"])
                    for row in rows
                    if (row["run"], row["predictor"], row["budget"]) == (run, name, budget)
                    and row["fetch_cap"] == (None if name == "lru" else CAP)
                )
                if len(points) > 1:
                    x, recall = zip(*points, strict=True)
                    line = look[name].line() | {"linestyle": dashes}
                    places = [room + look[name].shift for room in x]
                    axes.plot(places, recall, label=f"{name}, {budget:,}", **line)
        axes.set(title=RUNS[run], xlabel="resident slots per block of budget")
    said = f"budgets of {' and '.join(f'{budget:,}' for budget in budgets)}"
    said += f", at most {CAP:.0%} of a budget fetched ahead a step"
    _entitle(figure, results, rows, said, "Points of the same slots are set side by side.")
    legend(figure, 4)
    return figure


def _panels(rows: Cells) -> tuple[Figure, list[tuple[str, Axes]]]:
    """A panel of recall for each kind of generation that the rows have."""
    runs = [run for run in RUNS if any(row["run"] == run for row in rows)]
    figure, panels = figure_of(1, len(runs), (max(5.6, 4.6 * len(runs)), 4.2))
    for axes in panels[0]:
        axes.set_ylabel("wanted blocks resident in time, %")
        axes.grid(color="0.9")
    return figure, list(zip(runs, panels[0], strict=True))


def _entitle(figure: Figure, results: dict[str, Any], rows: Cells, setup: str, note: str) -> None:
    """Which model on which text, and under which choices."""
    first, text = results["about"]["recordings"][0], rows[0]["text"]
    what = f"'{text}', {TEXTS[text]}" if text in TEXTS else f"'{text}'"
    entitle(
        figure,
        f"{first['model']}, {first['dtype']}: {what}, {first['context']:,} tokens read and "
        f"{first['following']} decoded",
        f"Blocks ranked by {rows[0]['index']}, misses fetched; {setup}.",
        note,
    )


def _default_index(results: dict[str, Any]) -> Cells:
    """Rows of the index that was swept over."""
    return [row for row in results["rows"] if row["index"] == results["rows"][0]["index"]]
