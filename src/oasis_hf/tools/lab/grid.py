"""Every predictor at equal fast memory: what is replayed, and how it is summed up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...lookahead import predictor
from .recording import Recording, Run
from .replay import LRU, Options, Outcome, replay
from .scores import Scores, score

WARM_UP = 8
"""First rounds that count for nothing: the residents still come from the prompt's last query."""
BOOTSTRAPS, BOOTSTRAP_BLOCK = 2000, 8
"""Resamples of an interval, and rounds in a row that are drawn together: neighbours are alike."""
CAPS = (0.01, 0.02, 0.05, 0.10, 0.20, None)
ORACLE = "oracle"
DEFAULT_PREDICTORS = (*("last", "rows", "past", "ngram", "draft", "layer", "draft+layer"),)


@dataclass(frozen=True)
class Grid:
    """What is compared, and on how much of it the options are swept.

    Attributes:
        predictors: besides LRU and the oracle, which are always there.
        indexes: the first is swept over; the others only compared, without a cap.
        budgets: tokens per KV head.
        swept: predictors whose options are changed, one at a time, beside LRU's and the oracle's.
        swept_runs: generations for which they are.
        head_rooms, caps, policies: what they are changed to.
    """

    predictors: tuple[str, ...] = DEFAULT_PREDICTORS
    indexes: tuple[str, ...] = ("keys2bit", "minmax")
    budgets: tuple[int, ...] = (512, 2048)
    swept: tuple[str, ...] = ("layer",)
    swept_runs: tuple[str, ...] = ("right", "lookup")
    head_rooms: tuple[float, ...] = (1.0, 3.0)
    caps: tuple[float | None, ...] = CAPS
    policies: tuple[str | float, ...] = ("skip",)

    def options(self, name: str, run: Run, index: str) -> list[Options]:
        """Predictors at the default cap and without; then one change of an option at a time."""
        found = []
        first = index == self.indexes[0]
        if not first and name not in self.swept_runs:
            return []
        predictors, swept_predictors = (
            [predictor for predictor in named if _differs(predictor, run)]
            for named in (self.predictors, self.swept)
        )
        for budget in self.budgets:
            base = Options(budget=budget)
            found += [
                replace(base, predictor=name, fetch_cap=cap)
                for name in (LRU, *predictors, ORACLE)
                for cap in ((base.fetch_cap, None) if first else (None,))
            ]
            if not first or name not in self.swept_runs:
                continue
            swept = [replace(base, predictor=name) for name in swept_predictors]
            beside = [base, *swept, replace(base, predictor=ORACLE)]
            found += [replace(x, fetch_cap=cap) for x in swept for cap in self.caps]
            found += [replace(x, head_room=room) for x in beside for room in self.head_rooms]
            found += [replace(x, on_miss=miss) for x in beside for miss in self.policies]
        return list(dict.fromkeys(found))


def _differs(name: str, run: Run) -> bool:
    """Whether a predictor differs from "last": without probes or drafts, some do not."""
    if "draft" in name:
        return bool((run.probes > 0).any())
    if "rows" in name or "past" in name:
        return bool((run.rows > 1).any())
    return True


def measure(
    recording: Recording, grid: Grid, progress: Callable[[str], None] = lambda text: None
) -> Iterator[dict[str, Any]]:
    """One record for each generation of a recording, index and set of options."""
    names = {name: predictor(name) for name in (*grid.predictors, ORACLE)}
    for run_name, run in recording.runs.items():
        for index in grid.indexes:
            options = grid.options(run_name, run, index)
            if not options:
                continue
            progress(f"{recording.about['text']}, {run_name}: {len(options)} replays over {index}")
            scores = score(recording, run, index, names)
            shared = {"text": recording.about["text"], "run": run_name, "index": index}
            shared |= {"rounds": len(run.rows), "tokens": run.tokens}
            shared |= {"acceptance": round(run.acceptance, 4)}
            yield from (shared | row for row in _replays(scores, options))


def _replays(scores: Scores, options: list[Options]) -> Iterator[dict[str, Any]]:
    outcomes: dict[Options, Outcome] = {}
    for chosen in options:
        # Where every miss is fetched at once, LRU has nothing left to cap.
        if chosen.predictor == LRU and chosen.on_miss == "fetch":
            chosen = replace(chosen, fetch_cap=None)
        if chosen not in outcomes:
            outcomes[chosen] = replay(scores, chosen)
    for chosen, outcome in outcomes.items():
        alone = replace(chosen, predictor=LRU)
        if alone not in outcomes:
            alone = replace(alone, fetch_cap=None)
        record = asdict(chosen) | summarise(scores, outcome, outcomes.get(alone))
        if (chosen.head_room, chosen.on_miss) != (Options.head_room, Options.on_miss):
            del record["recall_by_layer"]
        yield record


def summarise(scores: Scores, outcome: Outcome, alone: Outcome | None) -> dict[str, Any]:
    """Figures of one replay; shares are of blocks, bytes per committed token of all layers.

    Args:
        scores: what was replayed.
        outcome: its outcome.
        alone: the outcome of LRU with as many slots, or None for no difference to it.
    """
    warm = min(WARM_UP, len(outcome.recall) - 1)
    recall = outcome.recall[warm:]
    layout, heads = scores.layout, scores.wanted.shape[2]
    block_bytes = layout.block_size * 2 * scores.head_dim * 2
    tokens = int(scores.tokens[warm:].sum())
    record: dict[str, Any] = {
        "recall": recall.mean().item(),
        "recall_p5": recall.flatten().quantile(0.05).item(),
        "recall_min": recall.min().item(),
        "recall_by_layer": recall.mean(0).tolist(),
        "recall_true": outcome.recall_true[warm:].mean().item(),
        "mass": outcome.mass[warm:].mean().item(),
        "attended": outcome.attended[warm:].mean().item(),
        "precision": (outcome.used[warm:].sum() / outcome.ahead[warm:].sum()).item(),
    }
    for name in ("ahead", "now", "behind"):
        blocks = getattr(outcome, name)[warm:].sum().item()
        record[f"{name}_bytes"] = round(blocks * heads * block_bytes / tokens)
    if alone is not None:
        difference = recall.mean(1) - alone.recall[warm:].mean(1)
        record["over_lru"] = [difference.mean().item(), *interval(difference)]
    return {name: _rounded(value) for name, value in record.items()}


def interval(values: Tensor) -> tuple[float, float]:
    """95 % interval of the mean of `[R]`, by bootstrap over rounds in a row (wrapping around)."""
    generator = torch.Generator().manual_seed(0)
    count = -(-len(values) // BOOTSTRAP_BLOCK)
    first = torch.randint(len(values), (BOOTSTRAPS, count, 1), generator=generator)
    drawn = (first + torch.arange(BOOTSTRAP_BLOCK)) % len(values)
    means = values[drawn.flatten(1)[:, : len(values)]].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    return low, high


def _rounded(value: Any) -> Any:
    """Four places; None for the precision of nothing."""
    if isinstance(value, list):
        return [round(part, 4) for part in value]
    if isinstance(value, float):
        return None if value != value else round(value, 4)
    return value
