"""Runs all arms on all samples, and keeps every answer as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from oasis_hf.facts.compat import text_config
from oasis_hf.tools.packaged import load, smollm2

from ..arms import Arm
from ..config import ConfigError, EvalConfig
from ..environment import describe
from ..material.prose import Prose
from ..material.texts import available, read_text, source_name
from ..records import (
    CONFIG,
    SAMPLES,
    Record,
    as_lines,
    identity,
    place,
    read_json,
    read_records,
    write_json,
)
from ..tasks import TASKS
from ..tasks.dataset import Generator, idle_cores
from ..tasks.parts import Sample
from .batches import batches, fitting
from .drift import drifted
from .judges import answered, scored

Progress = Callable[[int, int, Record], None]
"""Called after every result: (results there are, results in all, this one)."""
JUDGES = {"loss": scored, "drift": drifted}
"""Who compares the arms, by metric; answers are judged otherwise."""


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
    write_json(out / CONFIG, about)
    known = {identity(record) for record in records}
    total = len(config.tasks) * len(config.contexts) * len(config.arms) * config.samples
    makes = Generator(tokenizer, Prose(read_text(text)), config.seed, idle_cores(model))
    with (
        (out / SAMPLES).open("a", encoding="utf-8") as log,
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
                    log.write(as_lines([record]))
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
    log = out / SAMPLES
    try:
        return read_records(log) if log.exists() else []
    except ValueError as error:
        raise ConfigError(f"{error}; remove the line to have it made again") from error


def check_folder(config: EvalConfig, out: Path) -> None:
    """Raise `ConfigError` where a folder holds the run of another config."""
    about = out / CONFIG
    if not about.exists():
        return
    try:
        made = read_json(about)
        digest, old = made["digest"], dict(made["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"out: got {out}, whose {CONFIG} is not that of a run; name another folder"
        ) from error
    if digest != config.digest:
        new = config.as_dict()
        keys = [key for key in new if new[key] != old.get(key)]
        raise ConfigError(
            f"out: {out} holds a run with other {', '.join(keys)}; name another folder, or "
            "run it with the config that it has"
        )


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
