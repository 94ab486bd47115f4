"""Runs all arms on all samples, and keeps every answer as soon as it is there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from oasis_hf.packaged import load, smollm2

from .arms import Arm
from .config import ConfigError, EvalConfig
from .environment import describe
from .fidelity import closeness, forced, loss, selection
from .metrics import score
from .prompt import follow_up, opening, plain
from .prose import Prose
from .replay import capture
from .sample import Sample
from .session import Answer, Session, answer, attended, counts
from .tasks import TASKS, build
from .texts import available, read_text, source_name

Record = dict[str, Any]
"""One arm's result for one sample."""
Progress = Callable[[int, int, Record], None]
"""Called after every result: (results there are, results in all, this one)."""
STOPS = {"string_match_all", "string_match_part"}
"""Metrics by which an answer that is right cannot get better, so that decoding stops."""


def run(
    config: EvalConfig, out: Path, progress: Progress | None = None, pair: Any = None
) -> list[Record]:
    """Runs what is missing in the folder `out`.

    Args:
        config: what to run.
        out: folder of the run; results of an equal config are kept, and completed.
        progress: called after every result.
        pair: a model with the "oasis" attention and its tokenizer; the config's by default.

    Raises:
        ConfigError: the folder belongs to another config, or a task or context does not fit.
    """
    records = opened(config, out)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options = {"dtype": config.dtype} if config.dtype else {}
    model, tokenizer = pair or load(config.model or smollm2(), **options)
    check_length(model, config)
    text = config.text or available()
    about = describe(model) | {"text": source_name(text)}
    about |= {"config": config.as_dict(), "digest": config.digest}
    (out / "config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    prose = Prose(read_text(text))
    known = {identity(record) for record in records}
    total = len(config.tasks) * len(config.contexts) * len(config.arms) * config.samples
    with (out / "samples.jsonl").open("a", encoding="utf-8") as log, torch.inference_mode():
        for context in config.contexts:
            for task in config.tasks:
                try:
                    samples = build(task, tokenizer, context, config.samples, config.seed, prose)
                except ValueError as error:
                    raise ConfigError(f"contexts: {error}") from error
                for sample in samples:
                    missing = [
                        arm
                        for arm in config.parsed_arms
                        if (task, context, sample["number"], arm.name) not in known
                    ]
                    for record in evaluated(model, tokenizer, sample, missing, config):
                        records.append(record)
                        log.write(json.dumps(record) + "\n")
                        log.flush()
                        if progress:
                            progress(len(records), total, record)
    return records


def opened(config: EvalConfig, out: Path) -> list[Record]:
    """The results that the folder holds; makes the folder if it is not there.

    Raises:
        ConfigError: they are of another config; the message names what differs.
    """
    about = out / "config.json"
    if about.exists():
        found = json.loads(about.read_text(encoding="utf-8"))
        if found["digest"] != config.digest:
            old, new = found["config"], config.as_dict()
            keys = [key for key in new if new[key] != old.get(key)]
            raise ConfigError(
                f"out: {out} holds a run with other {', '.join(keys)}; name another folder, or "
                "run it with the config that it has"
            )
    out.mkdir(parents=True, exist_ok=True)
    log = out / "samples.jsonl"
    return read_records(log) if log.exists() else []


def read_records(log: Path) -> list[Record]:
    """All results of a run; a last line that was not written in full is dropped, on disk too."""
    text = log.read_text(encoding="utf-8")
    whole, _, torn = text.rpartition("\n")
    if torn:
        log.write_text(whole + "\n" if whole else "", encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def identity(record: Record) -> tuple[str, int, int, str]:
    """What makes a result one of its own."""
    return record["task"], record["context"], record["number"], record["arm"]


def check_length(model: Any, config: EvalConfig) -> None:
    """Raise `ConfigError` for contexts that the model has no positions for."""
    most = getattr(model.config, "max_position_embeddings", None)
    for context in config.contexts:
        if most is not None and context > most:
            raise ConfigError(f"contexts: got {context}, but the model has {most} positions")


def evaluated(
    model: Any, tokenizer: Any, sample: Sample, arms: list[Arm], config: EvalConfig
) -> Iterator[Record]:
    """Yield one record for each arm; the prompt is read once, if there are any."""
    if not arms:
        return
    shared = {name: sample[name] for name in ("task", "context", "number", "tokens", "depths")}
    judge = answered if sample["turns"] else scored
    for arm, record in judge(model, tokenizer, sample, arms, config.answer_tokens):
        yield shared | {"arm": arm.name} | record


def answered(
    model: Any, tokenizer: Any, sample: Sample, arms: list[Arm], most: int | None
) -> Iterator[tuple[Arm, Record]]:
    """Each arm's answers to the questions of a sample, one after another in one conversation."""
    first = sample["turns"][0]
    ids = opening(tokenizer, sample["text"], first["question"], first["lead_in"])
    session = Session(model, ids[:-1])
    metric = TASKS[sample["task"]].metric
    limit = min(sample["answer_tokens"], most or sample["answer_tokens"])
    for arm in arms:
        started = time.perf_counter()
        cache = session.cache(arm)
        answers: list[Answer] = []
        given = ids[-1:]
        for turn in sample["turns"]:
            if answers:
                asked = follow_up(tokenizer, turn["question"], turn["lead_in"])
                given = answers[-1].pending + asked
            found = answer(model, tokenizer, cache, given, limit, stop(metric, turn["references"]))
            answers.append(found)
        scores = [
            score(metric, found.text, turn["references"])
            for found, turn in zip(answers, sample["turns"], strict=True)
        ]
        record: Record = {
            "score": sum(scores) / len(scores),
            "answers": [found.text for found in answers],
            "ids": answers[0].ids,
            "references": [turn["references"] for turn in sample["turns"]],
            "answer_tokens": sum(len(found.ids) for found in answers),
            "seconds": round(time.perf_counter() - started, 2),
            "reading": round(session.seconds, 2),
        }
        record |= counts(cache)
        if not arm.dense:
            steps = range(len(ids) - 1, len(ids) - 1 + max(1, len(answers[0].ids)))
            record["attended"] = attended(cache, steps)
        yield arm, record


def stop(metric: str, references: list[str]) -> Callable[[str], bool]:
    """Whether an answer can get no better."""
    return lambda text: metric in STOPS and score_is_full(metric, text, references)


def score_is_full(metric: str, text: str, references: list[str]) -> bool:
    """Whether all references, or for questions any, are there; cheaper than the metric."""
    found = [reference.lower() in text.lower() for reference in references]
    return all(found) if metric == "string_match_all" else any(found)


def scored(
    model: Any, tokenizer: Any, sample: Sample, arms: list[Arm], most: int | None
) -> Iterator[tuple[Arm, Record]]:
    """Each arm's loss on the last tokens of a text, and how close it stays to dense attention."""
    ids = plain(tokenizer, sample["text"])
    steps = min(sample["answer_tokens"], most or sample["answer_tokens"])
    session = Session(model, ids[: -steps - 1])
    # Each step predicts the next token: the last one is only predicted.
    given, targets = torch.tensor([ids[-steps - 1 : -1]]), torch.tensor(ids[-steps:])
    dense_cache = session.cache(Arm("dense"))
    dense, layers = capture(model, dense_cache, given)
    for arm in arms:
        started = time.perf_counter()
        record: Record = {"reading": round(session.seconds, 2)}
        logits = dense
        if not arm.dense:
            cache = session.cache(arm)
            logits = forced(session, cache, given)
            record |= counts(cache) | closeness(logits, dense) | selection(layers, arm)
            record["attended"] = attended(cache, range(len(ids) - steps - 1, len(ids) - 1))
        record["loss"] = loss(logits, targets)
        record["seconds"] = round(time.perf_counter() - started, 2)
        yield arm, record
