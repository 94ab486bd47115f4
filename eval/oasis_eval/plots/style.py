"""How all plots look: lines that can be told apart where they coincide, titles, legends, files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, StrMethodFormatter

COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#555555", "#8C564B", "#999900"),
)
"""Okabe and Ito's palette and two more, told apart by colour-blind readers too."""
OF_INDEX = dict(zip(("keys2bit", "minmax", "oracle", "mean", "streaming"), COLOURS, strict=False))
OF_INDEX["dense"] = "#000000"
"""Indexes, and dense attention, have the same colour in all plots."""
MARKERS = "osD^vP*X<>phd"
DASHES: tuple[Any, ...] = (
    *("solid", (0, (4, 2)), (0, (1, 1.3))),
    *((0, (6, 2, 1, 2)), (0, (8, 1.5)), (0, (3, 1, 1, 1, 1, 1))),
)
WIDEST, NARROWEST = 3.2, 1.2
"""Points of the lines below and above: of lines that coincide, all show."""
APART = 0.07
"""Distance of lines at one value, in doublings of it or in places."""
LETTERS = 15
"""Of a title, for each inch of a figure."""
PLAIN = StrMethodFormatter("{x:,.0f}")
SETTINGS: dict[Any, Any] = {
    "figure.dpi": 120,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "legend.frameon": False,
    # Text as text: small files, which can be searched.
    "svg.fonttype": "none",
    "svg.hashsalt": "oasis-hf",
}


@dataclass(frozen=True)
class Look:
    """How one line is drawn.

    Attributes:
        colour: of line and markers.
        marker: one of its own.
        dashes: of the line.
        width: narrower than those of the lines below.
        shift: how far it is set aside, in doublings of x or in places.
    """

    colour: str
    marker: str
    dashes: Any
    width: float
    shift: float

    def line(self) -> dict[str, Any]:
        """Arguments of `plot` and `errorbar`; no marker is cut at an edge."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dashes,
            "linewidth": self.width,
            "markersize": 6,
            "markeredgecolor": "white",
            "markeredgewidth": 0.6,
            "clip_on": False,
        }

    def beside(self, values: Iterable[float]) -> list[float]:
        """Values of a logarithmic axis, a little aside."""
        return [value * 2**self.shift for value in values]


def looks(names: Sequence[str], apart: float = APART, by_index: bool = True) -> dict[str, Look]:
    """Looks for arms, or for lines of any names, all of them different.

    Args:
        names: of the lines, from the one that is drawn first to the one above it.
        apart: how far each is set aside from the next.
        by_index: colours are those of the index, and dashes those of the policy for misses, for the
            first line of both; else they are each line's own, as markers always are.
    """
    indexes = [name.split("/")[0] for name in names]
    others = [colour for colour in COLOURS if colour not in OF_INDEX.values()]
    found: dict[str, Look] = {}
    for number, (name, index) in enumerate(zip(names, indexes, strict=True)):
        if not by_index:
            colour = COLOURS[number % len(COLOURS)]
        elif index in OF_INDEX:
            colour = OF_INDEX[index]
        else:
            rest = [x for x in dict.fromkeys(indexes) if x not in OF_INDEX]
            colour = others[rest.index(index) % len(others)]
        share = number / max(1, len(names) - 1)
        found[name] = Look(
            colour,
            MARKERS[number % len(MARKERS)],
            _dashes(name, colour, found) if by_index else DASHES[number % len(DASHES)],
            WIDEST + share * (NARROWEST - WIDEST),
            apart * (number - (len(names) - 1) / 2),
        )
    return found


def _dashes(arm: str, colour: str, others: dict[str, Look]) -> Any:
    """Solid where misses are fetched, dashed where they are skipped, dotted else.

    Another kind where a line of that colour has these.
    """
    policy = arm.split("/")[1:2]
    usual = DASHES[0 if policy in ([], ["fetch"]) else 1 if policy == ["skip"] else 2]
    taken = [look.dashes for look in others.values() if look.colour == colour]
    rest = [dashes for dashes in DASHES[3:] if dashes not in taken]
    return usual if usual not in taken or not rest else rest[0]


def styled() -> AbstractContextManager[None]:
    """Within it, figures look alike."""
    return plt.rc_context(SETTINGS)


def figure_of(rows: int, columns: int, size: tuple[float, float], **more: Any) -> Any:
    """A figure and its panels `[rows][columns]`."""
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **more)


def entitle(figure: Figure, *lines: str) -> None:
    """Says above the panels what is shown: of which model, on which tasks."""
    most = int(LETTERS * figure.get_figwidth())
    text = "\n".join(part for line in lines for part in textwrap.wrap(line, most))
    figure.suptitle(text, x=0.01, ha="left", fontsize=9)


def legend(figure: Figure, columns: int, **more: Any) -> None:
    """Every label of any panel once, below the panels."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        found |= {n: h for n, h in zip(names, handles, strict=True) if n not in found}
    figure.legend(
        found.values(), found, loc="outside lower left", ncols=columns, handlelength=4, **more
    )


def doublings(axes: Axes, values: Sequence[int], label: str) -> None:
    """A logarithmic x axis with just these ticks, and room for lines that are set aside."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(values[0] / 2**0.5, values[-1] * 2**0.5)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticklabels([f"{value:,}" for value in values])
    axes.set_xlabel(label)


def percent(axes: Axes, top: float = 100, room: float = 0.06) -> None:
    """A y axis from 0 to `top` percent, with a share of room for markers at both ends."""
    axes.set_ylim(-room * top, (1 + room) * top)
    axes.grid(color="0.9")


def save(figure: Figure, path: Path) -> Path:
    """Writes a file, the same for the same results, and closes the figure."""
    svg = path.suffix == ".svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if svg else {})
    plt.close(figure)
    return path
