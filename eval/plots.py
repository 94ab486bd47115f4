"""Draws the results: speed and memory of decoding, throughput, needles found.

python eval/plots.py              # SVGs into eval/results/plots/
python eval/plots.py --kind png --folder /tmp
"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import typer
from tables import LABELS, cache_name

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

RESULTS = Path(__file__).parent / "results"
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#999999")
"""Okabe and Ito's palette, told apart by colour-blind readers too."""

LOOKAHEAD_RUNS = {"right": "one token a step", "lookup": "prompt lookup"}
LOOKAHEAD_SHOWN = ("oracle", "layer", "draft", "last", "lru")
STYLES = ("o--", "s-", "^:")
PLAIN = StrMethodFormatter("{x:,.0f}")
STYLE = {
    "figure.dpi": 120,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "oasis-hf",
}
Rows = list[dict[str, Any]]
Size = tuple[int, int]


def shown(results: dict[str, Any]) -> dict[str, dict[Size, dict[str, Any]]]:
    """Rows of the bench by cache and size: the policy and budget of the first Oasis row alone.

    The offloaded cache, hundreds of times slower, is left to the table.
    """
    rows = [row for row in results["rows"] if "error" not in row]
    base = next(row["options"] for row in rows if row["arm"] == "oasis")
    caches: dict[str, dict[Size, dict[str, Any]]] = {}
    for row in rows:
        options = row["options"]
        chosen = ("budget", "on_miss", "fetch_cap")
        same = all(options.get(name) == base.get(name) for name in chosen if options)
        if row["arm"] == "offloaded" or not same:
            continue
        name = cache_name(row, base["budget"]).replace("`", "")
        caches.setdefault(name, {})[row["batch"], row["tokens"]] = row
    return dict(sorted(caches.items(), key=lambda item: not item[0].startswith("oasis")))


def sizes_of(caches: dict[str, dict[Size, dict[str, Any]]]) -> list[Size]:
    """Every size that a row has, small contexts first within a batch."""
    return sorted({size for rows in caches.values() for size in rows})


def label(size: Size) -> str:
    """A size for people: batch and context."""
    return f"B{size[0]}, {round(size[1] / 1024)}K"


def decoding(results: dict[str, Any]) -> Figure:
    """Milliseconds per step and peak HBM, grouped by size, beside the floor."""
    caches = shown(results)
    sizes = sizes_of(caches)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    _bars(left, caches, sizes, "ms_p50", 1.0, floor=True)
    left.set_yscale("log")
    left.set_ylim(1, 1.4 * left.get_ylim()[1])
    left.yaxis.set_major_formatter(PLAIN)
    left.set_ylabel("ms per decode step, median (log scale)")
    _bars(right, caches, sizes, "peak_hbm_bytes", 1e9, floor=False)
    right.margins(y=0.08)
    right.set_ylabel("peak HBM while decoding (GB)")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4))
    return figure


def _bars(
    axes: Axes,
    caches: dict[str, dict[Size, dict[str, Any]]],
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
    axes.set_xticks(range(len(sizes)), [label(size) for size in sizes])
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
    figure, axes = plt.subplots(figsize=(5.6, 4.2), layout="constrained")
    contexts = sorted({tokens for _, tokens in sizes_of(caches)})
    styles = dict(zip(contexts, cycle(STYLES), strict=False))
    for colour, (name, rows) in zip(cycle(COLOURS), caches.items(), strict=False):
        for context, style in styles.items():
            points = sorted(
                (b, r["tokens_per_second"]) for (b, t), r in rows.items() if t == context
            )
            if points:
                axes.plot(*zip(*points, strict=True), style, color=colour)
        axes.plot([], [], color=colour, lw=4, label=name)
    for context, style in styles.items():
        axes.plot([], [], style, color="black", label=f"{round(context / 1024)}K tokens of context")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _ticks(axes, sorted({batch for batch, _ in sizes_of(caches)}))
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("sequences (log scale)")
    axes.set_ylabel("tokens per second (log scale)")
    axes.grid(color="0.9")
    figure.legend(loc="outside lower center", ncols=2, handlelength=3.5)
    return figure


def needles(results: dict[str, Any]) -> Figure:
    """Needles answered over budget, misses fetched: a line per index, a panel per context."""
    cells = [cell for cell in results["cells"] if cell["on_miss"] == "fetch"]
    contexts = sorted({cell["context"] for cell in cells})
    figure, panels = plt.subplots(
        1, len(contexts), figsize=(4.4 * len(contexts), 3.8), layout="constrained", squeeze=False
    )
    for axes, context in zip(panels[0], contexts, strict=True):
        for colour, (index, name) in zip(cycle(COLOURS), LABELS.items(), strict=False):
            points = sorted(
                (cell["budget"], cell["hits"])
                for cell in cells
                if cell["index"] == index and cell["context"] == context
            )
            if points:
                what = name.replace("`", "")
                # A broad line under the others: the best that they can do.
                under = {"lw": 6, "alpha": 0.4, "zorder": 1} if index == "oracle" else {}
                axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=what, **under)
        here = [cell for cell in cells if cell["context"] == context]
        count = max(cell["of"] for cell in here)
        axes.axhline(count, color="0.6", lw=1, ls=":", label="dense attention", zorder=0)
        axes.set_xscale("log", base=2)
        _ticks(axes, sorted({cell["budget"] for cell in here}))
        axes.set_title(f"{context:,} tokens of context")
        axes.set_xlabel("budget (tokens per KV head, log scale)")
        axes.set_ylabel(f"needles answered, of {count}")
        axes.set_ylim(-0.5, count + 0.9)
        axes.grid(color="0.9")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure


def lookahead_layers(results: dict[str, Any]) -> Figure:
    """Recall by layer: a line per predictor, a panel per kind of generation."""
    rows = [
        row
        for row in _default_index(results)
        if (row["head_room"], row["on_miss"], row["fetch_cap"]) == (2.0, "fetch", None)
    ]
    budget = min(row["budget"] for row in rows)
    rows = [row for row in rows if row["budget"] == budget and row["text"] == rows[0]["text"]]
    figure, panels = _panels(rows)
    for run, axes in panels:
        for colour, name in zip(cycle(COLOURS), LOOKAHEAD_SHOWN, strict=False):
            for row in rows:
                if (row["run"], row["predictor"]) == (run, name):
                    axes.plot([100 * x for x in row["recall_by_layer"]], color=colour, label=name)
        axes.set_title(f"{rows[0]['text']}, budget {budget:,}: {LOOKAHEAD_RUNS[run]}")
        axes.set_xlabel("layer")
    _one_legend(figure)
    return figure


def lookahead_head_room(results: dict[str, Any]) -> Figure:
    """Recall over slots, at the default cap: a line per predictor, a panel per generation."""
    rows = [row for row in _default_index(results) if row["on_miss"] == "fetch"]
    text, budgets = rows[0]["text"], sorted({row["budget"] for row in rows})
    figure, panels = _panels(rows)
    for run, axes in panels:
        for colour, name in zip(cycle(COLOURS), LOOKAHEAD_SHOWN, strict=False):
            for budget, style in zip(budgets, cycle(STYLES), strict=False):
                points = sorted(
                    (row["head_room"], 100 * row["recall"])
                    for row in rows
                    if (row["run"], row["predictor"], row["budget"]) == (run, name, budget)
                    and row["text"] == text
                    and row["fetch_cap"] in ((None,) if name == "lru" else (0.05,))
                )
                if len(points) > 1:
                    axes.plot(
                        *zip(*points, strict=True), style, color=colour, label=f"{name}, {budget:,}"
                    )
        axes.set_title(f"{text}: {LOOKAHEAD_RUNS[run]}")
        axes.set_xlabel("resident slots per block of budget")
    _one_legend(figure)
    return figure


def _panels(rows: Rows) -> tuple[Figure, list[tuple[str, Axes]]]:
    """A panel of recall for each kind of generation that the rows have."""
    runs = [run for run in LOOKAHEAD_RUNS if any(row["run"] == run for row in rows)]
    figure, panels = plt.subplots(
        1, len(runs), figsize=(4.4 * len(runs), 3.6), layout="constrained", squeeze=False
    )
    for axes in panels[0]:
        axes.set_ylabel("wanted blocks resident in time (%)")
        axes.grid(color="0.9")
    return figure, list(zip(runs, panels[0], strict=True))


def _default_index(results: dict[str, Any]) -> Rows:
    """Rows of the index that was swept over."""
    return [row for row in results["rows"] if row["index"] == results["rows"][0]["index"]]


def _one_legend(figure: Figure) -> None:
    """Every label of any panel once, below the panels."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        found |= dict(zip(names, handles, strict=True))
    figure.legend(found.values(), found, loc="outside lower center", ncols=6)


def _ticks(axes: Axes, values: list[int]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{value:,}" for value in values])


def main(
    results: Path = typer.Option(RESULTS, help="Where bench.json and needles.json are."),
    folder: Path = typer.Option(RESULTS / "plots", help="Where the plots go."),
    kind: str = typer.Option("svg", help="svg or png."),
) -> None:
    """Draw every plot whose results are there."""
    plots = {"decoding": "bench", "throughput": "bench", "needles": "needles"}
    plots |= {"lookahead-layers": "lookahead", "lookahead-head-room": "lookahead"}
    draw = {"decoding": decoding, "throughput": throughput, "needles": needles}
    draw |= {"lookahead-layers": lookahead_layers, "lookahead-head-room": lookahead_head_room}
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in plots.items():
        path = results / f"{source}.json"
        if not path.is_file():
            continue
        with plt.rc_context(STYLE):
            figure = draw[name](json.loads(path.read_text(encoding="utf-8")))
            # Without a date, the same results give the same file.
            figure.savefig(
                folder / f"{name}.{kind}", metadata={"Date": None} if kind == "svg" else {}
            )
            plt.close(figure)
        print(folder / f"{name}.{kind}")


if __name__ == "__main__":
    typer.run(main)
