"""Scores of a run over budget, over context, and over what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..arms import DENSE, named
from ..records import OVERALL, Cells, grouped
from .names import arm_order, subject, tasks_of
from .place import name_points
from .style import Look, doublings, entitle, figure_of, legend, looks, percent

COSTS = {
    "hbm_bytes": "KV cache in fast memory, MB a sequence",
    "bytes_per_step": "moved over the link, MB a step",
}
DENSE_LINE: dict[str, Any] = {"color": "black", "linestyle": (0, (2, 1)), "linewidth": 1}


def over_budget(about: dict[str, Any], cells: Cells) -> Figure:
    """Mean score over the budget, a panel for each context, with dense as a line across."""
    contexts = grouped(overall(cells), "context")
    look = looks(list(families(overall(cells))))
    top = 100 * max(0.1, *(cell["high"] for cell in overall(cells)))
    figure, panels = figure_of(
        1, len(contexts), (max(5.6, 4.2 * len(contexts)), 3.9 + 0.1 * len(look)), sharey=True
    )
    for axes, (context, found) in zip(panels[0], contexts.items(), strict=True):
        for family, line in _lines(found, look):
            x = look[family].beside(named(cell["arm"]).budget for cell in line)
            _with_intervals(axes, x, line, look[family], family)
        for cell in found:
            if cell["arm"] == DENSE.name:
                axes.axhline(100 * cell["mean"], label="dense", zorder=0, **DENSE_LINE)
        doublings(axes, budgets(found), "budget, tokens per KV head (log scale)")
        axes.set_title(f"{context:,} tokens of context")
        percent(axes, top)
    panels[0][0].set_ylabel("score, %")
    about_points = "Bars: 95 % intervals. Points of one budget are set side by side."
    entitle(figure, f"{subject(about)}: score over budget", tasks_of(cells, about), about_points)
    legend(figure, 2)
    return figure


def over_context(about: dict[str, Any], cells: Cells) -> Figure:
    """Mean score at each context, for each arm that has more than one."""
    contexts = sorted({cell["context"] for cell in cells})
    arms = {arm: x for arm, x in grouped(overall(cells), "arm").items() if len(x) > 1}
    names = sorted(arms, key=arm_order)
    look = looks(names, 0.8 / len(names))
    figure, ((axes,),) = figure_of(1, 1, (max(5.6, 3.2 * len(contexts)), 4.2 + 0.1 * len(names)))
    for arm in names:
        line = sorted(arms[arm], key=lambda cell: cell["context"])
        x = [contexts.index(cell["context"]) + look[arm].shift for cell in line]
        # Lines would hide one another where many arms are all right.
        _with_intervals(axes, x, line, look[arm], arm, linestyle="none")
    axes.set_xticks(range(len(contexts)), [f"{count:,}" for count in contexts])
    axes.set_xlim(-0.5, len(contexts) - 0.5)
    for edge in range(1, len(contexts)):
        axes.axvline(edge - 0.5, color="0.8", lw=0.8)
    axes.set(xlabel="tokens of context", ylabel="score, %")
    percent(axes)
    about_points = "Bars: 95 % intervals. Points of one context are set side by side."
    entitle(figure, f"{subject(about)}: score by context", tasks_of(cells, about), about_points)
    legend(figure, 2)
    return figure


def over_cost(about: dict[str, Any], cells: Cells) -> Figure:
    """Mean score over what it takes: a row of panels for each context, a line for each family."""
    contexts = grouped(overall(cells), "context")
    look = looks(list(families(overall(cells))))
    figure, panels = figure_of(
        len(contexts), 2, (9.6, 4.2 * len(contexts) + 0.1 * len(look)), sharey=True
    )
    points: list[tuple[Axes, float, float, str, str]] = []
    for row, (context, found) in zip(panels, contexts.items(), strict=True):
        for axes, (name, label) in zip(row, COSTS.items(), strict=True):
            counted = [cell for cell in found if name in cell]
            for family, line in _lines(counted, look):
                x = [cell[name] / 1e6 for cell in line]
                y = [100 * cell["mean"] for cell in line]
                axes.plot(x, y, label=family, **look[family].line())
                said = (f"{named(cell['arm']).budget:,}" for cell in line)
                points += [
                    (axes, *point, look[family].colour) for point in zip(x, y, said, strict=True)
                ]
            for cell in counted:
                if cell["arm"] == DENSE.name:
                    x, y = [cell[name] / 1e6], [100 * cell["mean"]]
                    axes.plot(x, y, "kX", ms=7, label="dense", clip_on=False)
            axes.set(xlabel=label, title=f"{context:,} tokens of context")
            most = max((cell[name] / 1e6 for cell in counted), default=0.0) or 1.0
            axes.set_xlim(-0.04 * most, 1.08 * most)
            percent(axes, 100 * max(0.1, *(cell["mean"] for cell in found)), 0.12)
        row[0].set_ylabel("score, %")
    about_points = "A number at a point is its budget, in tokens per KV head."
    entitle(figure, f"{subject(about)}: score over cost", tasks_of(cells, about), about_points)
    legend(figure, 3)
    name_points(figure, points)
    return figure


def budgets(cells: Cells) -> list[int]:
    """The budgets that scores were measured at."""
    return sorted({named(cell["arm"]).budget for cell in cells} - {0})


def overall(cells: Cells) -> Cells:
    """Cells over all tasks; the only task's where there is one."""
    return [cell for cell in cells if cell["task"] == OVERALL] or cells


def families(cells: Cells) -> dict[str, Cells]:
    """Sparse cells by all but their budget, by ascending budget."""
    groups: dict[str, Cells] = {}
    for cell in sorted(cells, key=lambda cell: named(cell["arm"]).budget):
        arm = named(cell["arm"])
        if not arm.dense:
            groups.setdefault(arm.family, []).append(cell)
    return {family: groups[family] for family in sorted(groups, key=_order(groups))}


def _order(groups: dict[str, Cells]) -> Callable[[str], Any]:
    """Sorts families as their first arms."""
    return lambda family: arm_order(groups[family][0]["arm"])


def _lines(cells: Cells, look: dict[str, Look]) -> list[tuple[str, Cells]]:
    found = families(cells)
    return [(family, found[family]) for family in look if family in found]


def _with_intervals(
    axes: Axes, x: list[float], line: Cells, look: Look, label: str, **more: Any
) -> None:
    """A line with the intervals of its points."""
    y = [100 * cell["mean"] for cell in line]
    below = [100 * (cell["mean"] - cell["low"]) for cell in line]
    above = [100 * (cell["high"] - cell["mean"]) for cell in line]
    bars: dict[str, Any] = {"elinewidth": 0.8, "capsize": 1.5, "label": label}
    axes.errorbar(x, y, (below, above), **bars, **look.line() | more)
