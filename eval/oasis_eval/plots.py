"""Plots of a run: scores over the budget, and needles by depth and context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from .arms import DENSE, named
from .run import Record
from .summary import OVERALL, Cells, grouped

BINS = 5
"""Rows of a heat map."""
ABREAST = 8
"""Most heat maps side by side."""


def draw(folder: Path, records: list[Record], cells: Cells) -> list[str]:
    """Draws what there is to draw; returns the names of the files."""
    # Text as text, and no date: the same results give the same small file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "oasis", "font.size": 9})
    files = []
    if budgets(cells):
        files.append(_save(over_budget(cells), folder / "budget.svg"))
    needles = [record for record in records if len(record["depths"]) == 1 and "score" in record]
    if needles:
        files.append(_save(by_depth(needles), folder / "depth.svg"))
    return files


def budgets(cells: Cells) -> list[int]:
    """The budgets that scores were measured at."""
    return sorted({named(cell["arm"]).budget for cell in cells} - {0})


def over_budget(cells: Cells) -> Any:
    """Mean score over the budget, a panel for each context, with dense as a line across."""
    contexts = grouped(_overall(cells), "context")
    top = 104 * max(0.1, *(cell["high"] for cell in _overall(cells)))
    figure, axes = plt.subplots(
        1, len(contexts), figsize=(3.6 * len(contexts) + 1.6, 3), sharey=True, squeeze=False
    )
    for axis, (context, found) in zip(axes[0], contexts.items(), strict=True):
        for family, line in sorted(_families(found).items()):
            x = [named(cell["arm"]).budget for cell in line]
            y = [100 * cell["mean"] for cell in line]
            axis.plot(x, y, marker="o", label=family)
            axis.fill_between(
                x,
                [100 * cell["low"] for cell in line],
                [100 * cell["high"] for cell in line],
                alpha=0.12,
            )
        dense = next((cell for cell in found if cell["arm"] == DENSE.name), None)
        if dense:
            axis.axhline(100 * dense["mean"], color="black", linestyle="--", label="dense")
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets(found), [f"{count:,}" for count in budgets(found)])
        axis.set(title=f"{context:,} tokens", xlabel="budget, tokens per KV head")
        axis.set_ylim(-0.04 * top, top)
    axes[0][0].set_ylabel("score, %")
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def _overall(cells: Cells) -> Cells:
    """Cells over all tasks; the only task's where there is one."""
    return [cell for cell in cells if cell["task"] == OVERALL] or cells


def _families(cells: Cells) -> dict[str, Cells]:
    """Sparse cells by all but their budget, by ascending budget."""
    groups: dict[str, Cells] = {}
    for cell in sorted(cells, key=lambda cell: named(cell["arm"]).budget):
        arm = named(cell["arm"])
        if not arm.dense:
            groups.setdefault(arm.family, []).append(cell)
    return groups


def by_depth(records: list[Record]) -> Any:
    """A heat map for each arm: mean score of tasks with one needle, by its depth and context."""
    arms = grouped(records, "arm")
    contexts = sorted({record["context"] for record in records})
    rows = -(-len(arms) // ABREAST)
    columns = -(-len(arms) // rows)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(1.7 * columns + 1, 2.6 * rows),
        sharey=True,
        squeeze=False,
        gridspec_kw={"hspace": 0.7},
    )
    for axis in axes.flat[len(arms) :]:
        axis.set_axis_off()
    for axis, (arm, found) in zip(axes.flat, arms.items(), strict=False):
        image = axis.imshow(
            grid(found, contexts), vmin=0, vmax=100, cmap="RdYlGn", aspect="auto", origin="upper"
        )
        axis.set_title(arm.replace("/", "\n"), fontsize=7)
        axis.set_xticks(range(len(contexts)), [f"{count / 1024:g}K" for count in contexts])
        axis.set_yticks(range(BINS), [f"{100 * n // BINS} %" for n in range(BINS)])
    for line in axes:
        line[0].set_ylabel("depth from")
    figure.colorbar(image, ax=axes.ravel().tolist(), label="score, %")
    return figure


def grid(records: list[Record], contexts: list[int]) -> list[list[float]]:
    """Percent right by depth (rows) and context (columns); NaN where there are no samples."""
    found = [[float("nan")] * len(contexts) for _ in range(BINS)]
    for (row, context), group in grouped(
        [record | {"row": depth_bin(record["depths"][0])} for record in records], "row", "context"
    ).items():
        scores = [record["score"] for record in group]
        found[row][contexts.index(context)] = 100 * sum(scores) / len(scores)
    return found


def depth_bin(depth: float) -> int:
    """The row of a depth from 0 to 1."""
    return min(int(depth * BINS), BINS - 1)


def _save(figure: Any, path: Path) -> str:
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return path.name
