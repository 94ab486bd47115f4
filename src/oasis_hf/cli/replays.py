"""What `oasis-hf lookahead` prints and writes of its replays."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_CAP = 0.05
LEGEND = (
    "Percent. Recall, its 5th percentile and least value over rounds and layers; over lru: with "
    "its 95 % interval; true: of the blocks that the true attention would choose; mass: of the "
    "attention, held in time; used: of what was fetched ahead. kB: moved per token."
)


def added(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Two reports as one: of a text that both have, the newer runs."""
    runs = {(row["text"], row["run"]) for row in new["rows"]}
    rows = [row for row in old["rows"] if (row["text"], row["run"]) not in runs]
    texts = {recording["text"] for recording in new["about"]["recordings"]}
    kept = [x for x in old["about"]["recordings"] if x["text"] not in texts]
    commands = dict.fromkeys([old["about"]["command"], new["about"]["command"]])
    about = new["about"] | {"command": "; ".join(commands)}
    about["recordings"] = kept + new["about"]["recordings"]
    return {"about": about, "rows": rows + new["rows"]}


def environment() -> dict[str, Any]:
    """What figures need beside them; the command without the places of its files."""
    from importlib.metadata import version

    words, given = [], iter(sys.argv[1:])
    for word in given:
        if word in ("--out", "--recordings"):
            next(given)
        elif word != "--add":
            words.append(word)
    return {
        "command": shlex.join(["oasis-hf", *words]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        **{name.replace("-", "_"): version(name) for name in ("torch", "transformers")},
    }


def show(rows: Iterable[dict[str, Any]], shown: Console) -> None:
    """Predictors at equal slots, where misses are fetched; one table per text, run and budget."""
    from rich import box
    from rich.table import Table

    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        default = row["head_room"] == 2.0 and row["on_miss"] == "fetch"
        if default and row["fetch_cap"] in (None, SHOWN_CAP):
            key = tuple(row[name] for name in ("text", "run", "index", "budget"))
            groups.setdefault(key, []).append(row)
    for (text, run, index, budget), found in groups.items():
        table = Table(
            box=box.SIMPLE_HEAD,
            title=f"{text}, {run}, {index}, budget {budget:,}",
            padding=0,
            show_edge=False,
        )
        for name in ("predictor", "cap"):
            table.add_column(name)
        for name in ("recall", "5 %", "least", "over lru", "true", "mass", "used", "kB"):
            table.add_column(name, justify="right")
        for row in found:
            mean, low, high = (100 * part for part in row.get("over_lru", (0, 0, 0)))
            used = row["precision"]
            table.add_row(
                row["predictor"],
                "" if row["fetch_cap"] is None else f"{row['fetch_cap']:g}",
                *(f"{100 * row[name]:.1f}" for name in ("recall", "recall_p5", "recall_min")),
                f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]",
                f"{100 * row['recall_true']:.1f}",
                f"{100 * row['mass']:.1f}",
                "" if used is None else f"{100 * used:.0f}",
                f"{(row['ahead_bytes'] + row['now_bytes'] + row['behind_bytes']) / 1e3:,.0f}",
            )
        shown.print(table)
        shown.print()
    if groups:
        shown.print(LEGEND)
