"""The arms of a comparison, and one arm's answers to a batch of prompts."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from haystack import Batch
from torch import Tensor

from oasis_eval.session import attended, dense_copy, feed
from oasis_hf import OasisCache
from oasis_hf.config import BLOCK

FETCH_CAP = 0.05
PREFILL_CHUNK = 512
BASELINES = ("mean", "streaming")
ESTIMATES_MASS = ("keys2bit", "oracle")
COMPLETE = re.compile(r"\d{5}")


@dataclass(frozen=True)
class Arm:
    """One column of the comparison; the dense one has no budget."""

    index: str
    on_miss: str
    budget: int

    @property
    def name(self) -> str:
        """Identifies the arm in logs."""
        return f"{self.index}/{self.on_miss}/{self.budget}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the cache."""
        miss = self.on_miss if self.on_miss in ("fetch", "skip") else float(self.on_miss)
        return {
            "index": self.index,
            "on_miss": miss,
            "budget": self.budget,
            "fetch_cap": FETCH_CAP,
            # The same for all indexes.
            "block_size": BLOCK,
        }


DENSE = Arm("dense", "none", 0)


def plan(
    indexes: Iterable[str], policies: Iterable[str], budgets: Iterable[int], every: bool = False
) -> list[Arm]:
    """The arms to run.

    Every index ranks at every budget with misses fetched: then its choice is all that counts. The
    other policies are run for the indexes that someone would use, the thresholds only where the
    index estimates mass. With `every`, all combinations that exist.
    """
    budgets = sorted(budgets)
    arms = []
    for index in indexes:
        for policy in policies:
            threshold = policy not in ("fetch", "skip")
            if threshold and index not in ESTIMATES_MASS:
                continue
            if not every and policy != "fetch" and index in (*BASELINES, "oracle"):
                continue
            few = not every and (index in BASELINES or (policy == "skip" and index != "keys2bit"))
            chosen = budgets[1::2] if few and len(budgets) > 2 else budgets
            arms += [Arm(index, policy, budget) for budget in chosen]
    return arms


def read(model: Any, batch: Batch, keep: Path | None = None) -> OasisCache:
    """Read the prompts, all but their last token, densely.

    Args:
        model: the model.
        batch: the prompts.
        keep: folder in which the text and question that were read are kept for the next run.
    """
    options: dict[str, Any] = {"index": "streaming", "on_miss": "skip"}
    text, rest = batch.ids[:, :-1], torch.cat([batch.ids[:, -1:], batch.lead_in], 1)[:, :-1]
    name = hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]
    kept = keep / f"{name}.safetensors" if keep else None
    if kept and kept.exists():
        base = OasisCache.load(kept, model, **options)
    else:
        base = OasisCache(model, **options)
        for piece in text.split(PREFILL_CHUNK, dim=1):
            feed(model, base, piece)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            base.save(kept)
    if rest.shape[1]:
        feed(model, base, rest)
    return base


def decode(
    model: Any, tokenizer: Any, cache: Any, last: Tensor, limit: int
) -> tuple[list[str], int]:
    """Decode greedily until every row has a number of five digits, or has ended.

    Returns:
        The answers, and how many steps they took together.
    """
    rows: list[list[int]] = [[] for _ in range(last.shape[0])]
    done = [False] * len(rows)
    token, steps = last, 0
    while not all(done) and steps < limit:
        token = feed(model, cache, token).argmax(-1, keepdim=True)
        steps += 1
        for number, new in enumerate(token[:, 0].tolist()):
            if done[number]:
                continue
            rows[number].append(new)
            text = tokenizer.decode(rows[number])
            done[number] = new == tokenizer.eos_token_id or bool(COMPLETE.search(text))
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows], steps


def run_arm(
    model: Any,
    tokenizer: Any,
    base: OasisCache,
    arm: Arm,
    last: Tensor,
    limit: int,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Answers of one arm, and what its cache counted."""
    started = time.perf_counter()
    cache = dense_copy(model, base) if arm == DENSE else base.fork(**(arm.options | extra))
    texts, steps = decode(model, tokenizer, cache, last, limit)
    result: dict[str, Any] = {"answers": texts, "steps": steps}
    if isinstance(cache, OasisCache):
        stats = cache.stats().as_dict()
        kept = ("hit_rate", "fetched_now", "admitted", "refused", "turnover")
        result |= {name: round(stats[name], 5) for name in kept}
        length = base.get_seq_length()
        result["attended"] = attended(cache, range(length, length + steps))
    return result | {"seconds": round(time.perf_counter() - started, 2)}
