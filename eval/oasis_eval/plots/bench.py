"""Speed and memory of decoding, from the bench."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..labels import cache_name, miss_label, size_label
from .style import COLOURS, DASHES, PLAIN, doublings, entitle, figure_of, legend, looks

Size = tuple[int, int]
Rows = dict[Size, dict[str, Any]]


def shown(results: dict[str, Any]) -> dict[str, Rows]:
    """Rows of the bench by cache and size: the policy and budget of the first Oasis row alone.

    The offloaded cache, hundreds of times slower, is left to the table.
    """
    rows = [row for row in results["rows"] if "error" not in row]
    base = next(row["options"] for row in rows if row["arm"] == "oasis")
    caches: dict[str, Rows] = {}
    for row in rows:
        options = row["options"]
        chosen = ("budget", "on_miss", "fetch_cap")
        same = all(options.get(name) == base.get(name) for name in chosen if options)
        if row["arm"] == "offloaded" or not same:
            continue
        name = cache_name(row, base["budget"]).replace("`", "")
        caches.setdefault(name, {})[row["batch"], row["tokens"]] = row
    return dict(sorted(caches.items(), key=lambda item: not item[0].startswith("oasis")))


def sizes_of(caches: dict[str, Rows]) -> list[Size]:
    """Every size that a row has, small contexts first within a batch."""
    return sorted({size for rows in caches.values() for size in rows})


def decoding(results: dict[str, Any]) -> Figure:
    """Milliseconds per step and peak HBM, grouped by size, next to the floor."""
    caches = shown(results)
    sizes = sizes_of(caches)
    figure, ((left, right),) = figure_of(1, 2, (10, 4.2))
    _bars(left, caches, sizes, "ms_p50", 1.0, floor=True)
    left.set_yscale("log")
    left.set_ylim(1, 1.4 * left.get_ylim()[1])
    left.yaxis.set_major_formatter(PLAIN)
    left.set_ylabel("ms per decode step, median (log scale)")
    _bars(right, caches, sizes, "peak_hbm_bytes", 1e9, floor=False)
    right.margins(y=0.08)
    right.set_ylabel("peak HBM while decoding (GB)")
    entitle(figure, "Time and memory of a decode step", _setup(results))
    legend(figure, 4)
    return figure


def _setup(results: dict[str, Any]) -> str:
    """What was timed, and where."""
    base = next(row["options"] for row in results["rows"] if row["arm"] == "oasis")
    return (
        f"{results['shape']} shape, random weights, a workload of lasting heat; budget "
        f"{base['budget']:,}, a missing block is {miss_label(str(base['on_miss']))}; "
        f"{results['environment']['gpu']}"
    )


def _bars(
    axes: Axes,
    caches: dict[str, Rows],
    sizes: list[Size],
    key: str,
    unit: float,
    floor: bool,
) -> None:
    """One group per size, one bar per cache, its value above it."""
    width = 0.84 / len(caches)
    floors: list[tuple[float, float]] = []
    for place, (colour, name) in enumerate(zip(cycle(COLOURS), caches, strict=False)):
        rows = caches[name]
        for group, size in enumerate(sizes):
            x = group + (place - (len(caches) - 1) / 2) * width
            if size not in rows:
                if name == "DynamicCache":
                    _note(axes, x, "does not fit", colour)
                continue
            value = rows[size][key] / unit
            bar = axes.bar(x, value, width * 0.9, color=colour, label=name if group == 0 else None)
            text = f"{value:.1f}" if value < 10 else f"{value:.0f}"
            axes.bar_label(bar, [text], padding=2, fontsize=7)
            floors.append((x, rows[size]["floor_ms"]))
    if floor:
        ends = [(x - width * 0.45, x + width * 0.45) for x, _ in floors]
        axes.hlines(
            [y for _, y in floors], *zip(*ends, strict=True), color="black", lw=1.5, label="floor"
        )
    axes.set_xticks(range(len(sizes)), [size_label(*size) for size in sizes])
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.set_xlabel("sequences, tokens of context of each")
    axes.grid(axis="y", color="0.9")


def _note(axes: Axes, x: float, text: str, colour: str) -> None:
    """Upright text where a bar would stand."""
    transform = axes.get_xaxis_transform()
    axes.text(x, 0.02, text, rotation=90, ha="center", color=colour, transform=transform)


def throughput(results: dict[str, Any]) -> Figure:
    """Tokens per second over batch, a line per cache and context."""
    caches = shown(results)
    figure, ((axes,),) = figure_of(1, 1, (6.2, 4.8))
    contexts = sorted({tokens for _, tokens in sizes_of(caches)})
    look = looks(list(caches), 0.04, by_index=False)
    for name, rows in caches.items():
        for context, dashes in zip(contexts, cycle(DASHES), strict=False):
            points = sorted(
                (b, r["tokens_per_second"]) for (b, t), r in rows.items() if t == context
            )
            if points:
                x, y = zip(*points, strict=True)
                line = look[name].line() | {"linestyle": dashes}
                axes.plot(look[name].beside(x), y, **line)
        _in_legend(axes, name, **look[name].line() | {"linestyle": "none"})
    for context, dashes in zip(contexts, cycle(DASHES), strict=False):
        said = f"{round(context / 1024)}K tokens of context"
        _in_legend(axes, said, linestyle=dashes, color="black")
    axes.set_yscale("log")
    doublings(axes, sorted({batch for batch, _ in sizes_of(caches)}), "sequences (log scale)")
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_ylabel("tokens per second (log scale)")
    axes.grid(color="0.9")
    entitle(figure, "Throughput of decoding", _setup(results))
    legend(figure, 2)
    return figure


def _in_legend(axes: Axes, label: str, **line: Any) -> None:
    """A line that only the legend has."""
    for drawn in axes.plot([], [], label=label, **line):
        # Without points it would count as one in the corner of the figure.
        drawn.set_in_layout(False)
