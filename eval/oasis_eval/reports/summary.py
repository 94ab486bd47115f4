"""What a run comes to: scores by task, context and arm, and beside dense attention."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from ..arms import DENSE
from ..intervals import bootstrap, paired, stratified
from ..records import OVERALL, Cells, Record, grouped, mean, means, place
from ..runs.fidelity import divergence

SELECTION = ("mass", "mass_min_layer", "recall", "recall_p5", "recall_min")
FIDELITY = ("loss", "kl", "kl_max", "agreement", *SELECTION)
COSTS = (
    "hit_rate",
    "fetched_now",
    "refused",
    "turnover",
    "bytes_per_step",
    "attended",
    "hbm_bytes",
)


def summarise(records: list[Record]) -> dict[str, Any]:
    """Cells of scores and of fidelity.

    Returns:
        "scores": one cell per task, context and arm, and one over all tasks, with "mean", "low",
        "high" and "count", the same of the paired difference to dense as "change", and what the
        cache counted. "fidelity": the same for tasks without questions, means only, and "change"
        of the loss. "drift": what long outputs come to, see `drift_cells`.
    """
    answered = [record for record in records if "score" in record]
    forced = [record for record in records if "loss" in record and "drift" not in record]
    return {
        "scores": [*_cells(answered, "score"), *_overall(answered)],
        "fidelity": _cells(forced, "loss"),
        "drift": drift_cells([record for record in records if "drift" in record]),
    }


def drift_cells(records: list[Record]) -> Cells:
    """One cell per context and arm of long outputs.

    Returns:
        Means over samples by window of "kl", "agreement" and "loss", and of "free", the loss of the
        arm's own output under dense attention; as estimates "kl_slope" and "agreement_slope", each
        per 1,000 tokens, and "change" and "free_change", the paired differences of the losses to
        dense; "fresh_kl", that of the last window behind a dense reading of all before it, and
        "accumulated", the paired difference of the last window's KL to it, where they were taken;
        "parted", the median token where outputs part; "distinct", a share of 4-grams.
    """
    dense = {place(record): record for record in records if record["arm"] == DENSE.name}
    cells = []
    for (context, arm), found in grouped(records, "context", "arm").items():
        windows = [record["drift"] for record in found]
        cell: dict[str, Any] = {"context": context, "arm": arm, "count": len(found)}
        cell["steps"] = windows[0]["steps"]
        for name in ("kl", "agreement", "loss", "free"):
            cell[name] = np.mean([window[name] for window in windows], axis=0).tolist()
        for name in ("kl", "agreement"):
            slopes = [slope(window[name], window["steps"]) for window in windows]
            cell[f"{name}_slope"] = asdict(bootstrap(slopes))
        pairs = [
            (record["drift"], dense[place(record)]["drift"])
            for record in found
            if arm != DENSE.name and place(record) in dense
        ]
        for name, key in (("loss", "change"), ("free", "free_change")):
            if pairs:
                own, true = np.mean([[side[name] for side in pair] for pair in pairs], -1).T
                cell[key] = asdict(paired(own.tolist(), true.tolist()))
        if all("fresh_kl" in window for window in windows):
            fresh = [window["fresh_kl"] for window in windows]
            cell["fresh_kl"] = float(np.mean(fresh))
            cell["accumulated"] = asdict(paired([window["kl"][-1] for window in windows], fresh))
        # An output that never parts has parted after its end.
        parted = [w["steps"] if w["parted"] is None else w["parted"] for w in windows]
        cell["parted"] = float(np.median(parted))
        cell["distinct"] = float(np.mean([window["distinct"] for window in windows]))
        cells.append(cell)
    return cells


def slope(values: list[float], steps: int) -> float:
    """Least-squares slope of equal windows over `steps` tokens, per 1,000 tokens."""
    middle = (np.arange(len(values)) + 0.5) * steps / len(values)
    return float(1000 * np.polyfit(middle, values, 1)[0])


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
        cell |= means(found, *FIDELITY, *COSTS)
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
        cell |= means(found, *COSTS)
        cell["seconds"] = mean(found, "seconds")
        cells.append(cell)
    return cells


def _scores(records: list[Record]) -> list[float]:
    return [record["score"] for record in records]
