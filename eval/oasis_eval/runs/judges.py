"""How arms are compared on samples: by their answers, or by their loss on a text that is given."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..arms import DENSE, Arm
from ..config import EvalConfig
from ..metrics import scores
from ..records import Record
from ..tasks import TASKS
from ..tasks.parts import Sample
from ..tasks.prompt import follow_up, opening, plain
from .fidelity import closeness, forced, loss, selection
from .replay import capture
from .session import Answer, Session, answer, attended, counts
from .stops import stop


def answered(
    model: Any, tokenizer: Any, samples: list[Sample], arms: list[Arm], config: EvalConfig
) -> Iterator[tuple[Arm, list[Record]]]:
    """Each arm's answers to the questions of some samples, each sample one conversation."""
    ids = [
        opening(tokenizer, sample["text"], first["question"], first["lead_in"])
        for sample in samples
        for first in sample["turns"][:1]
    ]
    session = Session(model, [row[:-1] for row in ids])
    task = samples[0]["task"]
    metric, limit = TASKS[task].metric, config.limit(task, samples[0]["answer_tokens"])
    for arm in arms:
        started = time.perf_counter()
        cache = session.cache(arm)
        turns: list[list[Answer]] = []
        given = [row[-1:] for row in ids]
        for turn in zip(*(sample["turns"] for sample in samples), strict=True):
            if turns:
                asked = (follow_up(tokenizer, one["question"], one["lead_in"]) for one in turn)
                given = [row.pending + more for row, more in zip(turns[-1], asked, strict=True)]
            stops = [stop(metric, one["references"]) for one in turn]
            turns.append(answer(model, tokenizer, cache, given, limit, stops))
        took = (time.perf_counter() - started) / len(samples)
        shared: Record = {
            "seconds": round(took, 3),
            "reading": round(session.seconds / len(samples), 3),
        }
        shared |= counts(cache)
        if not arm.dense:
            start = len(ids[0]) - 1
            steps = max(1, *(len(row.ids) for row in turns[0]))
            shared["attended"] = attended(cache, range(start, start + steps))
        yield (
            arm,
            [
                _record(metric, sample, list(answers)) | shared
                for sample, answers in zip(samples, zip(*turns, strict=True), strict=True)
            ],
        )
        del cache
        if model.device.type == "cuda":
            # A cache is part of a cycle, and the next arm needs its memory.
            gc.collect()


def _record(metric: str, sample: Sample, answers: list[Answer]) -> Record:
    references = [turn["references"] for turn in sample["turns"]]
    texts = [found.text for found in answers]
    found = scores(metric, texts, references)
    return {
        "score": sum(found) / len(found),
        "answers": texts,
        "ids": answers[0].ids,
        "references": references,
        "answer_tokens": sum(len(found.ids) for found in answers),
    }


def scored(
    model: Any, tokenizer: Any, samples: list[Sample], arms: list[Arm], config: EvalConfig
) -> Iterator[tuple[Arm, list[Record]]]:
    """Each arm's loss on the last tokens of a text, and how close it stays to dense attention."""
    (sample,) = samples
    ids = plain(tokenizer, sample["text"])
    steps = config.limit(sample["task"], sample["answer_tokens"])
    session = Session(model, [ids[: -steps - 1]])
    # Each step predicts the next token: the last one is only predicted.
    given, targets = torch.tensor([ids[-steps - 1 : -1]]), torch.tensor(ids[-steps:])
    dense_cache = session.cache(DENSE)
    dense, layers = capture(model, dense_cache, given)
    for arm in arms:
        started = time.perf_counter()
        record: Record = {"reading": round(session.seconds, 3)}
        logits = dense
        if not arm.dense:
            cache = session.cache(arm)
            logits = forced(session, cache, given)
            record |= counts(cache) | closeness(logits, dense) | selection(layers, arm)
            record["attended"] = attended(cache, range(len(ids) - steps - 1, len(ids) - 1))
        record["loss"] = loss(logits, targets)
        record["seconds"] = round(time.perf_counter() - started, 3)
        yield arm, [record]
