"""What a run comes to: scores by task, context and arm, and beside dense attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from .arms import DENSE
from .fidelity import divergence
from .intervals import bootstrap, paired, stratified

Record = dict[str, Any]
Cells = list[dict[str, Any]]
SELECTION = ("mass", "mass_min_layer", "recall", "recall_p5", "recall_min")
FIDELITY = ("loss", "kl", "kl_max", "agreement", *SELECTION)
COSTS = ("hit_rate", "fetched_now", "refused", "turnover", "bytes_per_step", "attended")
OVERALL = "all tasks"
"""Stands for the mean over tasks, each of which counts the same."""


def summarise(records: list[Record]) -> dict[str, Any]:
    """Cells of scores and of fidelity.

    Returns:
        "scores": one cell per task, context and arm, and one over all tasks, with "mean", "low",
        "high" and "count", the same of the paired difference to dense as "change", and what the
        cache counted. "fidelity": the same for tasks without questions, means only, and "change"
        of the loss.
    """
    answered = [record for record in records if "score" in record]
    forced = [record for record in records if "loss" in record]
    return {
        "scores": [*_cells(answered, "score"), *_overall(answered)],
        "fidelity": _cells(forced, "loss"),
    }


def _cells(records: list[Record], key: str) -> Cells:
    dense = {place(record): record for record in records if record["arm"] == DENSE.name}
    cells = []
    for (task, context, arm), found in grouped(records, "task", "context", "arm").items():
        cell: dict[str, Any] = {"task": task, "context": context, "arm": arm}
        cell |= asdict(bootstrap([record[key] for record in found]))
        if arm != DENSE.name:
            pairs = [(record, dense[place(record)]) for record in found if place(record) in dense]
            if pairs:
                one, other = ([record[key] for record in side] for side in zip(*pairs, strict=True))
                cell["change"] = asdict(paired(one, other))
            cell |= _parting(pairs)
        cell |= {name: mean(found, name) for name in (*FIDELITY, *COSTS) if name in found[0]}
        cell["seconds"] = mean(found, "seconds")
        cells.append(cell)
    return cells


def _parting(pairs: list[tuple[Record, Record]]) -> dict[str, Any]:
    """How many answers are those of dense, and after how many tokens the others part from it."""
    if not pairs:
        return {}
    if "ids" in pairs[0][0]:
        places = [divergence(record["ids"], dense["ids"]) for record, dense in pairs]
    else:
        places = [record["first_divergence"] for record, _ in pairs]
    parted = [place for place in places if place is not None]
    found: dict[str, Any] = {"same": 1 - len(parted) / len(places)}
    if parted:
        found["first_divergence"] = sum(parted) / len(parted)
    return found


def _overall(records: list[Record]) -> Cells:
    """Means over tasks; samples are paired over arms by their number in each task.

    An arm that was not asked all tasks has none: its mean would be that of other questions.
    """
    cells = []
    every = {
        context: grouped(found, "task") for context, found in grouped(records, "context").items()
    }
    scores = {(place(record), record["arm"]): record["score"] for record in records}
    for (context, arm), found in grouped(records, "context", "arm").items():
        tasks = grouped(found, "task")
        if len(tasks) < max(2, len(every[context])):
            continue
        cell: dict[str, Any] = {"task": OVERALL, "context": context, "arm": arm}
        cell |= asdict(stratified([_scores(group) for group in tasks.values()]))
        changes = [
            [
                record["score"] - scores[place(record), DENSE.name]
                for record in group
                if (place(record), DENSE.name) in scores
            ]
            for group in tasks.values()
        ]
        if arm != DENSE.name and all(changes):
            cell["change"] = asdict(stratified(changes))
        cell |= {name: mean(found, name) for name in COSTS if name in found[0]}
        cell["seconds"] = mean(found, "seconds")
        cells.append(cell)
    return cells


def _scores(records: list[Record]) -> list[float]:
    return [record["score"] for record in records]


def reads_tf32(about: dict[str, Any]) -> bool:
    """Whether a run's prompts were read in TF32; its answers never are."""
    return bool(about["device"] != "cpu" and about["dtype"] == "float32")


def place(record: Record) -> tuple[str, int, int]:
    """What arms share: the sample."""
    return record["task"], record["context"], record["number"]


def grouped(records: Iterable[Record], *names: str) -> dict[Any, list[Record]]:
    """Records by some of their values, in the order in which they come."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        values = tuple(record[name] for name in names)
        groups[values if len(names) > 1 else values[0]].append(record)
    return dict(groups)


def mean(records: list[Record], name: str) -> float:
    """Mean of one value."""
    return float(sum(record[name] for record in records) / len(records))
