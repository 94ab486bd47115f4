"""All plots of a folder of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..records import CONFIG, SAMPLES, SUMMARY, load_run, read_json
from . import bench, lookahead, needles, of_run
from .style import save, styled

PLOTS: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "decoding": ("bench", bench.decoding),
    "throughput": ("bench", bench.throughput),
    "needles": ("needles", needles.needles),
    "lookahead-layers": ("lookahead", lookahead.lookahead_layers),
    "lookahead-head-room": ("lookahead", lookahead.lookahead_head_room),
}
"""Plots by name: the result that each is made from, and what draws it."""
FOLDER = "plots"
"""Where these go, among the results."""


def draw_all(results: Path, out: Path | None = None, kind: str = "svg") -> Iterator[Path]:
    """Draws every plot whose results are there, and yields the files.

    Args:
        results: a folder of results: JSON files, and folders of runs with their summaries.
        out: where the plots go, in folders as in `results`; there by default.
        kind: ending of the files, "svg" or "png".

    Raises:
        FileNotFoundError: there are no results.
    """
    target, found = out or results, False
    for name, (source, figure) in PLOTS.items():
        path = results / f"{source}.json"
        if path.is_file():
            found = True
            with styled():
                yield save(figure(read_json(path)), target / FOLDER / f"{name}.{kind}")
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        if all((folder / name).is_file() for name in (CONFIG, SAMPLES, SUMMARY)):
            found = True
            about, records = load_run(folder)
            cells = read_json(folder / SUMMARY)["scores"]
            place = target / folder.name
            for file in of_run.draw(place, about, records, cells, kind):
                yield place / file
    if not found:
        raise FileNotFoundError(f"results: {results} holds no results, expected eval/results")
