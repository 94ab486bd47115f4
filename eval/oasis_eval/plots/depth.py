"""A map of the scores by the depth of the needle: a row for each arm, a panel for each context."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..records import Record, grouped
from .names import arm_order, subject, tasks_of
from .style import entitle, figure_of

BINS = 5
"""Columns of a map."""
COLOURS = "cividis"
"""From dark blue to yellow: the same order of lightness for all eyes."""
DARK = 55
"""Percent below which a cell is dark, and its number light."""
Grid = list[list[float | None]]


def by_depth(about: dict[str, Any], records: list[Record]) -> Figure:
    """Percent right of tasks with one needle; a cell without samples is hatched, and says so."""
    arms = sorted(grouped(records, "arm"), key=arm_order)
    contexts = sorted({record["context"] for record in records})
    figure, panels = figure_of(
        1, len(contexts), (3 + 2.6 * len(contexts), 1.7 + 0.22 * len(arms)), sharey=True
    )
    empty = False
    for axes, context in zip(panels[0], contexts, strict=True):
        found = grid([record for record in records if record["context"] == context], arms)
        numbers = [[float("nan") if x is None else x for x in row] for row in found]
        image = axes.imshow(numbers, vmin=0, vmax=100, cmap=COLOURS, aspect="auto")
        empty = empty or any(None in values for values in found)
        for row, values in enumerate(found):
            for column, value in enumerate(values):
                place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
                if value is None:
                    cell = (column - 0.5, row - 0.5)
                    axes.add_patch(Rectangle(cell, 1, 1, fc="white", ec="0.6", hatch="////", lw=0))
                    box = {"fc": "white", "ec": "none", "pad": 0.6}
                    axes.text(column, row, "none", color="0.3", bbox=box, **place)
                else:
                    colour = "white" if value < DARK else "black"
                    axes.text(column, row, f"{value:.0f}", color=colour, **place)
        edges = [f"{100 * n // BINS}-{100 * (n + 1) // BINS}" for n in range(BINS)]
        axes.set_xticks(range(BINS), edges, fontsize=7)
        axes.set_yticks(range(len(arms)), arms, fontsize=7)
        axes.set_xlabel("depth of the needle, % of the text")
        axes.set_title(f"{context:,} tokens of context")
    figure.colorbar(image, ax=list(panels[0]), label="score, %")
    entitle(
        figure,
        f"{subject(about)}: percent right by depth",
        tasks_of(records, about),
        *(["none: no samples at that depth"] if empty else []),
    )
    return figure


def grid(records: list[Record], arms: list[str]) -> Grid:
    """Percent right by arm (rows) and depth (columns); None where there are no samples."""
    found: Grid = [[None] * BINS for _ in arms]
    binned = [record | {"bin": depth_bin(record["depths"][0])} for record in records]
    for (arm, column), group in grouped(binned, "arm", "bin").items():
        scores = [record["score"] for record in group]
        found[arms.index(arm)][column] = 100 * sum(scores) / len(scores)
    return found


def depth_bin(depth: float) -> int:
    """The column of a depth from 0 to 1."""
    return min(int(depth * BINS), BINS - 1)
