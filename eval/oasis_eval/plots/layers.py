"""What the chosen blocks hold, layer by layer."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from ..records import Record, grouped
from .names import arm_order, subject, tasks_of
from .style import entitle, figure_of, legend, looks, percent

SHOWN = {"recall_by_layer": "recall of the best blocks, %", "mass_by_layer": "attention held, %"}
EVERY = 5
"""Layers from one marker of a line to the next: those of others come between."""


def by_layer(about: dict[str, Any], records: list[Record]) -> Figure:
    """Recall of the truly best blocks, and attention held, over the layers; a line for each arm."""
    arms = grouped(records, "arm")
    look = looks(sorted(arms, key=arm_order), by_index=False)
    figure, panels = figure_of(1, 2, (9.6, 3.6 + 0.1 * len(arms)), sharey=True)
    for axes, (name, label) in zip(panels[0], SHOWN.items(), strict=True):
        for number, (arm, found) in enumerate((arm, arms[arm]) for arm in look):
            layers = zip(*(record[name] for record in found), strict=True)
            held = [100 * sum(values) / len(values) for values in layers]
            every = (number % EVERY, EVERY) if len(held) > EVERY else None
            axes.plot(held, label=arm, markevery=every, **look[arm].line())
        axes.set(xlabel="layer", title=label)
        percent(axes)
    entitle(
        figure,
        f"{subject(about)}: the choice of blocks by layer",
        f"teacher-forced, {tasks_of(records, about)}",
    )
    legend(figure, 2)
    return figure
