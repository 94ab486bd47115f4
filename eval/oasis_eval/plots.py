"""Plots of a run: scores over budget, context, memory and traffic; needles by depth; layers."""

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
    if len({cell["context"] for cell in cells}) > 1:
        files.append(_save(over_context(cells), folder / "context.svg"))
    if budgets(cells) and any("hbm_bytes" in cell for cell in cells):
        files.append(_save(over_cost(cells), folder / "cost.svg"))
    needles = [record for record in records if len(record["depths"]) == 1 and "score" in record]
    if needles:
        files.append(_save(by_depth(needles), folder / "depth.svg"))
    replayed = [record for record in records if "recall_by_layer" in record]
    if replayed:
        files.append(_save(by_layer(replayed), folder / "layers.svg"))
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
    _name_lines(axes[0][-1])
    return figure


def over_context(cells: Cells) -> Any:
    """Mean score over the context, a line for each arm that has more than one."""
    figure, axis = plt.subplots(figsize=(4.5, 3))
    contexts = sorted({cell["context"] for cell in cells})
    for arm, found in grouped(_overall(cells), "arm").items():
        if len(found) > 1:
            line = sorted(found, key=lambda cell: cell["context"])
            x, y = [cell["context"] for cell in line], [100 * cell["mean"] for cell in line]
            style: dict[str, Any] = (
                {"color": "black", "linestyle": "--"} if arm == DENSE.name else {"marker": "o"}
            )
            axis.plot(x, y, label=arm, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [f"{count:,}" for count in contexts])
    axis.set(xlabel="context, tokens", ylabel="score, %")
    axis.set_ylim(bottom=0)
    _name_lines(axis)
    return figure


COSTS = {"hbm_bytes": "fast memory, MB a sequence", "bytes_per_step": "moved, MB a step"}


def over_cost(cells: Cells) -> Any:
    """Mean score over what it takes: a row of panels for each context, a line for each family."""
    contexts = grouped(_overall(cells), "context")
    figure, axes = plt.subplots(
        len(contexts), 2, figsize=(8, 3 * len(contexts)), sharey=True, squeeze=False
    )
    for row, (context, found) in zip(axes, contexts.items(), strict=True):
        for axis, (name, label) in zip(row, COSTS.items(), strict=True):
            counted = [cell for cell in found if name in cell]
            for family, line in sorted(_families(counted).items()):
                x = [cell[name] / 1e6 for cell in line]
                axis.plot(x, [100 * cell["mean"] for cell in line], marker="o", label=family)
            for cell in counted:
                if cell["arm"] == DENSE.name:
                    place = cell[name] / 1e6, 100 * cell["mean"]
                    axis.plot(*place, marker="s", color="black", linestyle="", label="dense")
            axis.set(xlabel=label, title=f"{context:,} tokens")
        row[0].set_ylabel("score, %")
        row[0].set_ylim(bottom=0)
        for axis in row:
            axis.set_xlim(left=0)
    figure.tight_layout()
    axes[0][0].figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
    )
    return figure


def by_layer(records: list[Record]) -> Any:
    """Recall of the truly best blocks, and attention held, over the layers; a line for each arm."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    names = {"recall_by_layer": "recall of the best blocks", "mass_by_layer": "attention held"}
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        for arm, found in grouped(records, "arm").items():
            layers = zip(*(record[name] for record in found), strict=True)
            axis.plot([100 * sum(values) / len(values) for values in layers], label=arm)
        axis.set(xlabel="layer", title=f"{label}, %", ylim=(-4, 104))
    _name_lines(axes[1])
    return figure


def _name_lines(axis: Any) -> None:
    """The legend, to the right of a panel."""
    axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)


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
