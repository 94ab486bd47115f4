"""Runs all arms on all samples, and keeps every answer as soon as it is there."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from oasis_hf.compat import text_config
from oasis_hf.packaged import load, smollm2

from .arms import Arm
from .batches import batches, fitting
from .config import ConfigError, EvalConfig
from .drift import drifted
from .environment import describe
from .fidelity import closeness, forced, loss, selection
from .generation import Generator, idle_cores
from .metrics import scores
from .prompt import follow_up, opening, plain
from .prose import Prose
from .replay import capture
from .sample import Sample
from .session import Answer, Session, answer, attended, counts
from .summary import place
from .tasks import TASKS
from .texts import available, read_text, source_name

Record = dict[str, Any]
"""One arm's result for one sample."""
Progress = Callable[[int, int, Record], None]
"""Called after every result: (results there are, results in all, this one)."""
STOPS = {"string_match_all", "string_match_part"}
"""Metrics by which an answer that is right cannot get better, so that decoding stops."""


def run(
    config: EvalConfig,
    out: Path,
    progress: Progress | None = None,
    pair: Any = None,
    batch: int | None = None,
    seconds: float | None = None,
) -> list[Record]:
    """Runs what is missing in the folder `out`.

    Args:
        config: what to run.
        out: folder of the run; results of an equal config are kept, and completed.
        progress: called after every result.
        pair: a model with the "oasis" attention and its tokenizer; the config's by default.
        batch: most samples read and answered together; what fits by default. Answers are those of
            samples alone, but for the rounding of larger products.
        seconds: no sample or arm is begun after so long; what is missing can be run later.

    Raises:
        ConfigError: the folder belongs to another config, or a task or context does not fit.
    """
    started = time.monotonic()
    records = opened(config, out)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options = {"dtype": config.dtype} if config.dtype else {}
    model, tokenizer = pair or load(config.model or smollm2(), **options)
    check_length(model.config, config)
    text = config.text or available()
    about = describe(model) | {"text": source_name(text)}
    about |= {"config": config.as_dict(), "digest": config.digest}
    (out / "config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    known = {identity(record) for record in records}
    total = len(config.tasks) * len(config.contexts) * len(config.arms) * config.samples
    makes = Generator(tokenizer, Prose(read_text(text)), config.seed, idle_cores(model))
    with (
        (out / "samples.jsonl").open("a", encoding="utf-8") as log,
        torch.inference_mode(),
        makes,
    ):
        for samples in planned(config, makes, model, batch):
            arms = [arm for arm in config.parsed_arms if _missing(samples, arm, known)]
            for found in evaluated(model, tokenizer, samples, arms, config):
                for record in found:
                    if identity(record) in known:
                        continue
                    known.add(identity(record))
                    records.append(record)
                    log.write(json.dumps(record) + "\n")
                    if progress:
                        progress(len(records), total, record)
                log.flush()
                if seconds is not None and time.monotonic() - started > seconds:
                    return records
    return records


def planned(
    config: EvalConfig, makes: Generator, model: Any, batch: int | None
) -> Iterator[list[Sample]]:
    """Yield the samples of every context and task, those together that are answered together."""
    for context in config.contexts:
        for task in config.tasks:
            makes.begin(task, context, config.samples)
    for context in config.contexts:
        for task in config.tasks:
            try:
                samples = makes.build(task, context, config.samples)
            except ValueError as error:
                raise ConfigError(f"contexts: {error}") from error
            yield from batches(samples, batch or fitting(model, context))


def _missing(samples: list[Sample], arm: Arm, known: set[tuple[str, int, int, str]]) -> bool:
    return any((*place(sample), arm.name) not in known for sample in samples)


def opened(config: EvalConfig, out: Path) -> list[Record]:
    """The results that the folder holds; makes the folder if it is not there.

    Raises:
        ConfigError: they are of another config; the message names what differs.
    """
    check_folder(config, out)
    out.mkdir(parents=True, exist_ok=True)
    log = out / "samples.jsonl"
    return read_records(log) if log.exists() else []


def check_folder(config: EvalConfig, out: Path) -> None:
    """Raise `ConfigError` where a folder holds the run of another config."""
    about = out / "config.json"
    if not about.exists():
        return
    try:
        made = json.loads(about.read_text(encoding="utf-8"))
        digest, old = made["digest"], made["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"out: got {out}, whose config.json is not that of a run; name another folder"
        ) from error
    if digest != config.digest:
        new = config.as_dict()
        keys = [key for key in new if new[key] != old.get(key)]
        raise ConfigError(
            f"out: {out} holds a run with other {', '.join(keys)}; name another folder, or "
            "run it with the config that it has"
        )


def read_records(log: Path) -> list[Record]:
    """All results of a run; a last line that was not written in full is dropped, on disk too."""
    text = log.read_text(encoding="utf-8")
    whole, _, torn = text.rpartition("\n")
    if torn:
        log.write_text(whole + "\n" if whole else "", encoding="utf-8")
    return [_record_of(line, f"{log}, line {n}") for n, line in enumerate(whole.splitlines(), 1)]


def _record_of(line: str, where: str) -> Record:
    """One result.

    Raises:
        ConfigError: the line is none.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is no JSON; remove the line to have it made again") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: is no result; remove the line to have it made again")
    return record


def identity(record: Record) -> tuple[str, int, int, str]:
    """What makes a result one of its own."""
    return record["task"], record["context"], record["number"], record["arm"]


def check_length(model_config: Any, config: EvalConfig) -> None:
    """Raise `ConfigError` for contexts that the model has no positions for."""
    most = getattr(text_config(model_config), "max_position_embeddings", None)
    for context in config.contexts:
        if most is not None and context > most:
            raise ConfigError(f"contexts: got {context}, but the model has {most} positions")


def evaluated(
    model: Any, tokenizer: Any, samples: list[Sample], arms: list[Arm], config: EvalConfig
) -> Iterator[list[Record]]:
    """Yield the records of each arm; the prompts are read once, if there are any arms.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        samples: of one task and length, as `batches` gives them.
        arms: what answers.
        config: the run's.
    """
    if not arms:
        return
    judge = JUDGES.get(TASKS[samples[0]["task"]].metric, answered)
    for arm, found in judge(model, tokenizer, samples, arms, config):
        yield [
            {name: sample[name] for name in ("task", "context", "number", "tokens", "depths")}
            | {"arm": arm.name, "rows": len(samples)}
            | record
            for sample, record in zip(samples, found, strict=True)
        ]


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


def stop(metric: str, references: list[str]) -> Callable[[str], bool]:
    """Whether an answer can get no better."""
    return lambda text: metric in STOPS and score_is_full(metric, text, references)


def score_is_full(metric: str, text: str, references: list[str]) -> bool:
    """Whether all references, or for questions any, are there; cheaper than the metric."""
    found = [reference.lower() in text.lower() for reference in references]
    return all(found) if metric == "string_match_all" else any(found)


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
    dense_cache = session.cache(Arm("dense"))
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


JUDGES = {"loss": scored, "drift": drifted}
"""Who compares the arms, by metric; answers are judged otherwise."""
