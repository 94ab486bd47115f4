"""Retrieval under sparse attention: which index, at which budget, still finds a fact in real prose?

Each prompt, prose with a needle in it, is read once, densely. From there every arm (an index, a
budget, a policy for misses) continues an identical copy of the cache: the last token of the prompt
and every decoded token attend sparsely. Only needles that dense attention answers count.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from oasis_hf.tools.packaged import load, smollm2

from ..arms import DENSE, Arm
from ..environment import command, describe
from ..material.texts import available, read_text, source_name
from ..records import Record, append_records, read_json, read_records, write_json
from ..runs.session import Session, answer, attended, counts
from .haystack import LEAD_IN, Batch, Haystack
from .plan import plan
from .summary import summarise

COMPLETE = re.compile(r"\d{5}")
"""A needle's number: an answer that has one gets no better."""
TRIES = 4
"""Most needles that are tried, in sizes of those that are wanted."""


@dataclass(frozen=True)
class Settings:
    """Choices of a run.

    Attributes:
        contexts: lengths of prompt and answer together, in tokens.
        budgets: tokens attended to per KV head.
        indexes: what ranks the blocks.
        policies: what is done about a missing block.
        needles: in each cell, all answered by dense attention.
        rows: prompts read and answered together.
        text: "austen", "essays", "reference" or a file; the best there is if empty.
        seed: of cities, numbers and places.
        model: a Hub id or a folder; the packaged SmolLM2 if empty.
        dtype: "float32" or "bfloat16"; what the machine is fast in if empty.
        options: more of them for every arm: "block_size=8/head_room=1".
        lead_in: give the start of the answer, as RULER does.
        every: all combinations, not only the informative ones.
    """

    contexts: tuple[int, ...] = (4096, 8192)
    budgets: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    indexes: tuple[str, ...] = ("keys2bit", "minmax", "oracle", "streaming", "mean")
    policies: tuple[str, ...] = ("fetch", "skip", "0.01")
    needles: int = 16
    rows: int = 4
    text: str = ""
    seed: int = 0
    model: str = ""
    dtype: str = ""
    options: str = ""
    lead_in: bool = True
    every: bool = False

    @property
    def arms(self) -> list[Arm]:
        """What is compared, besides dense attention."""
        return plan(self.indexes, self.policies, self.budgets, self.every, self.options)

    def check(self) -> None:
        """That there are arms, and that each can be used.

        Raises:
            ValueError: it cannot; says which part of it.
        """
        if not self.arms:
            raise ValueError(
                f"policies: got {', '.join(self.policies)}, under which none of "
                f"{', '.join(self.indexes)} is run; add fetch"
            )
        if self.dtype not in ("", "float32", "bfloat16"):
            raise ValueError(f"dtype: got {self.dtype!r}, expected float32 or bfloat16")


def run(
    settings: Settings, out: Path, resume: bool = False, tell: Callable[[str], None] = print
) -> dict[str, Any]:
    """Runs what is missing, and writes the summary and, next to it, a log of the answers.

    Args:
        settings: what to run.
        out: the summary; the log has its name and the ending .jsonl.
        resume: keep the answers of an earlier run with the same prompts.
        tell: told what is done, a line at a time.

    Raises:
        ValueError: an arm cannot be used.
        FileNotFoundError: the text is not there.
    """
    arms = settings.arms
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    text = settings.text or available()
    words = read_text(text)
    options = {"dtype": settings.dtype} if settings.dtype else {}
    model, tokenizer = load(settings.model or smollm2(), **options)
    same = {
        "seed": settings.seed,
        "lead_in": LEAD_IN if settings.lead_in else "",
        "text": source_name(text),
        "options": settings.options,
    }
    about = describe(model) | same
    about |= {"contexts": settings.contexts, "needles": settings.needles}
    about["command"] = _commands(out if resume else None)
    key = _digest(same | {name: about[name] for name in ("model", "dtype")})
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_suffix(".jsonl")
    records = read_records(log) if resume and log.exists() else []
    records = [record for record in records if record["key"] == key]
    if not resume:
        log.unlink(missing_ok=True)
    for context in settings.contexts:
        haystack = Haystack(tokenizer, words, context, settings.seed, settings.lead_in)
        first, left = 0, settings.needles
        while left > 0 and first < TRIES * settings.needles:
            batch = haystack.batch(first, min(settings.rows, left))
            tell(f"{context}: needles from {first}, {left} to go")
            known = _known(records, context, batch)
            with torch.inference_mode():
                for found in run_batch(model, tokenizer, batch, arms, known, tell):
                    found = [{"key": key, "context": context} | record for record in found]
                    records += found
                    append_records(log, found)
            dense = _known(records, context, batch)[DENSE.name]
            first, left = first + len(batch.needles), left - sum(x["hit"] for x in dense)
            write_json(out, summarise(about, records))
    return summarise(about, records)


def run_batch(
    model: Any,
    tokenizer: Any,
    batch: Batch,
    arms: list[Arm],
    known: dict[str, list[Record]],
    tell: Callable[[str], None],
) -> Iterator[list[Record]]:
    """Yield the records of every arm that is not known yet, the dense one first."""
    dense = known.get(DENSE.name)
    missing = [arm for arm in arms if arm.name not in known]
    if dense is not None and not (missing and any(sample["hit"] for sample in dense)):
        return
    session = Session(model, batch.prompts[:, :-1].tolist(), exact=True)
    tell(f"  read {len(batch.needles)} x {batch.tokens} tokens in {session.seconds:.0f} s")
    if dense is None:
        rows = list(range(len(batch.needles)))
        dense = answered(session, tokenizer, batch, DENSE, rows)
        yield _told(
            [record | {"reading": round(session.seconds, 2)} for record in dense], DENSE, tell
        )
    found = [record["needle"] - batch.first for record in dense if record["hit"]]
    if found and missing:
        session.keep(found)
        for arm in missing:
            yield _told(answered(session, tokenizer, batch, arm, found), arm, tell)


def answered(
    session: Session, tokenizer: Any, batch: Batch, arm: Arm, rows: list[int]
) -> list[Record]:
    """One arm's answers to some rows of a batch, which the session has read, and its counts."""
    started = time.perf_counter()
    cache = session.cache(arm)
    last = batch.prompts[rows, -1:].tolist()
    complete = [lambda text: bool(COMPLETE.search(text))] * len(rows)
    answers = answer(session.model, tokenizer, cache, last, batch.limit, complete)
    shared: Record = {"together": len(rows)}
    if not arm.dense:
        shared |= counts(cache)
        steps = max(1, *(len(found.ids) for found in answers), 1)
        shared["attended"] = attended(cache, range(batch.tokens - 1, batch.tokens - 1 + steps))
    shared["seconds"] = round(time.perf_counter() - started, 2)
    records = []
    for row, found in zip(rows, answers, strict=True):
        needle = batch.needles[row]
        record = {"needle": batch.first + row, "tokens": batch.tokens, "city": needle.city}
        record |= {"number": needle.number, "depth": round(needle.depth, 4), "arm": arm.name}
        records.append(record | {"answer": found.text, "hit": needle.answer in found.text} | shared)
    return records


def _told(records: list[Record], arm: Arm, tell: Callable[[str], None]) -> list[Record]:
    hits = sum(record["hit"] for record in records)
    tell(f"  {arm.name:<24} {hits}/{len(records)} {records[0]['seconds']:.0f} s")
    return records


def _known(records: list[Record], context: int, batch: Batch) -> dict[str, list[Record]]:
    """Records of one batch, by arm."""
    numbers = range(batch.first, batch.first + len(batch.needles))
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["context"] == context and record["needle"] in numbers:
            found.setdefault(record["arm"], []).append(record)
    return found


def _digest(settings: dict[str, Any]) -> str:
    """A short hash: answers of equal settings belong together."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _commands(earlier: Path | None) -> str:
    """The command, after those of the run that it resumes."""
    before = []
    if earlier is not None and earlier.exists():
        before = read_json(earlier)["about"]["command"].split("; ")
    return "; ".join(dict.fromkeys([*before, command(valued=("--out",), flags=("--resume",))]))
