"""Two runs side by side: what they both answered, sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..intervals import bootstrap, paired
from ..markdown import table
from ..records import Record, grouped, load_run, mean


def compare(first: Path, second: Path) -> str:
    """A Markdown page on the arms that both runs have.

    Samples with the same references are paired; where there are none, no difference is given.

    Raises:
        FileNotFoundError: a folder holds no run.
        ValueError: the runs share no task, context and arm.
    """
    (one, ours), (other, theirs) = load_run(first), load_run(second)
    left, right = (grouped(records, "task", "context", "arm") for records in (ours, theirs))
    shared = [key for key in left if key in right]
    if not shared:
        raise ValueError(f"{first} and {second} share no task, context and arm")
    rows = [[*_names(key), *_cells(left[key], right[key])] for key in shared]
    header = ["task", "context", "arm", "A", "B", "B - A", "pairs", "seconds A", "seconds B"]
    lines = [
        f"# {first.name} (A) and {second.name} (B)",
        _differences(one, other),
        table(header, rows),
        "Scores in percent, losses in nats; 95 % bootstrap intervals over pairs of samples.",
    ]
    return "\n\n".join(lines) + "\n"


def _names(key: tuple[str, int, str]) -> list[str]:
    return [key[0], f"{key[1]:,}", f"`{key[2]}`"]


def _cells(left: list[Record], right: list[Record]) -> list[str]:
    name = "score" if "score" in left[0] else "loss"
    scale, places = (100, 1) if name == "score" else (1, 4)
    others = {record["number"]: record for record in right}
    pairs = [
        (record[name], others[record["number"]][name])
        for record in left
        if record["number"] in others and _same(record, others[record["number"]])
    ]
    shown = [
        f"{scale * bootstrap([record[name] for record in side]).mean:.{places}f}"
        for side in (left, right)
    ]
    change = ""
    if pairs:
        before, after = zip(*pairs, strict=True)
        found = paired(after, before)
        change = "{:+.{p}f} ({:+.{p}f} to {:+.{p}f})".format(
            *(scale * value for value in (found.mean, found.low, found.high)), p=places
        )
    times = [f"{mean(side, 'seconds'):.1f}" for side in (left, right)]
    return [*shown, change, str(len(pairs)), *times]


def _same(one: Record, other: Record) -> bool:
    """Whether two results are of the same sample."""
    names = ("references", "tokens", "depths")
    return all(one.get(name) == other.get(name) for name in names)


def _differences(one: dict[str, Any], other: dict[str, Any]) -> str:
    """What the runs were made with, where it differs."""
    flat = [
        {**about["config"], **about["versions"]}
        | {name: about.get(name) for name in ("commit", "device", "dtype", "date", "text")}
        for about in (one, other)
    ]
    lines = [
        f"- {name}: {flat[0].get(name)} and {flat[1].get(name)}"
        for name in flat[0]
        if flat[0].get(name) != flat[1].get(name)
    ]
    return "\n".join(["They differ in:", "", *lines]) if lines else "They were made alike."
