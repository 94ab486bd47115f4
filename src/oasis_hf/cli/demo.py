"""`oasis-hf demo`: one question over a long text, answered dense and with Oasis, side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .. import OasisCache, OasisConfig, OasisConfigError
from ..facts.compat import cache_kwarg
from ..tools import needle, packaged
from .checks import fits, found_model, input_text, model_config, positions, tokenizer
from .errors import Mistake, option_of
from .report import Answer, print_question, print_report
from .terminal import Work, console, working

DEFAULT_CONTEXT = 4096
# Small enough for a bar that moves on two cores, large enough to keep them busy.
PREFILL_CHUNK = 512
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in ("budget", "index", "on_miss")}
"""Options of the cache, by the names that its errors begin with."""


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command, under the same names."""

    model: str | None = None
    document: Path | None = None
    question: str | None = None
    context: int | None = None
    budget: int = 256
    index: str = "keys2bit"
    on_miss: str = "fetch"
    max_new_tokens: int = 24
    cache_dir: Path | None = None


@dataclass(frozen=True)
class Task:
    """What is asked: ids `[1, tokens]`, and the fact to find unless the user asked their own."""

    input_ids: Any
    question: str
    fact: needle.Needle | None = None


@dataclass
class Clock(BaseStreamer):
    """Notes when each generated token arrives, and moves a bar."""

    work: Work
    times: list[float] = field(default_factory=list)

    def put(self, value: Any) -> None:
        """Takes the prompt first, then one new token after another."""
        self.times.append(time.perf_counter())
        self.work.move(len(self.times) - 1)

    def end(self) -> None:
        """Fills the bar, also when the answer ended early."""
        self.work.move(len(self.times) - 1, total=len(self.times) - 1)

    @property
    def ms_per_token(self) -> float:
        """Mean time between tokens; the first one, which ends the prefill, starts the clock."""
        arrivals = self.times[1:]
        return 1e3 * (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)


def run(options: DemoOptions, shown: Console | None = None) -> dict[str, Answer]:
    """Answers the question both ways and prints the comparison.

    Returns:
        The two answers, under "dense" and "oasis".

    Raises:
        Mistake: an option cannot be used; nothing has been loaded then but a tokenizer.
        Failure: the packaged model is not installed.
    """
    shown = shown or console()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    choices, text = _checked(options)
    with working("looking for the model") as work:
        source = found_model("--model", options.model, work.stage, options.cache_dir)
        task = _task(options, text, source)
        work.stage("loading the model")
        model, words = packaged.load(source)
    task = replace(task, input_ids=task.input_ids.to(model.device))
    oasis = OasisCache(model, **choices)
    print_question(
        shown,
        _setup(options, model, task),
        task.fact.sentence if task.fact else None,
        task.question,
    )
    caches = {"dense": DynamicCache(config=model.config), "oasis": oasis}
    with working("dense: reading the text") as work:
        answers = {
            name: _answer(name, cache, model, words, task, options, work)
            for name, cache in caches.items()
        }
    print_report(
        shown,
        answers["dense"],
        answers["oasis"],
        oasis.stats(),
        task.fact.answer if task.fact else None,
        on_cpu=model.device.type == "cpu",
    )
    return answers


def _setup(options: DemoOptions, model: Any, task: Task) -> str:
    name = Path(options.model).name if options.model else packaged.MODEL_NAME
    tokens = task.input_ids.shape[1]
    return (
        f"{name}, {str(model.dtype).removeprefix('torch.')} on {model.device.type} · "
        f"{tokens:,} tokens, {options.budget:,} of them attended to per step "
        f"({options.budget / tokens:.0%}) · index {options.index} · on miss {options.on_miss}"
    )


def _checked(options: DemoOptions) -> tuple[dict[str, Any], str | None]:
    """Options of the cache, and the document's text; all that can be checked without a model."""
    if options.question is not None and options.document is None:
        raise Mistake(
            f"--question: got {options.question!r} without a document to ask about; name one with "
            "--document FILE"
        )
    try:
        on_miss: str | float = float(options.on_miss)
    except ValueError:
        on_miss = options.on_miss
    choices: dict[str, Any] = {"budget": options.budget, "index": options.index, "on_miss": on_miss}
    try:
        OasisConfig(**choices)
    except OasisConfigError as error:
        raise option_of(error, OPTIONS) from error
    text = None if options.document is None else input_text("--document", options.document)
    if not options.model and options.context is not None:
        _check_room(options, options.context, packaged.MAX_POSITIONS)
    return choices, text


def _check_room(options: DemoOptions, tokens: int, most: int | None) -> None:
    """That prompt and answer have positions in the model."""
    fits(
        most,
        "--context and --max-new-tokens",
        tokens + options.max_new_tokens,
        f"use --context {(most or 0) - options.max_new_tokens} or less, or a smaller "
        "--max-new-tokens",
    )


def _task(options: DemoOptions, text: str | None, source: str | Path) -> Task:
    """The prompt, which needs the model's tokenizer and config alone."""
    most = positions(model_config("--model", source))
    words = tokenizer("--model", source)
    fact = needle.Needle() if options.question is None else None
    question = fact.question if fact else str(options.question)
    length = options.context
    if text is None:
        length = length or min(DEFAULT_CONTEXT, (most or DEFAULT_CONTEXT) - options.max_new_tokens)
        text = packaged.prose()
    if length is not None:
        _check_room(options, length, most)
        try:
            input_ids = needle.fitted_prompt(words, length, text, question, fact)
        except ValueError as error:
            raise option_of(error, {"context_tokens": "--context", "text": "--context"}) from error
    else:
        text = fact.hide_in(text) if fact else text
        input_ids = needle.encode_question(words, text, question)
        _check_room(options, input_ids.shape[1], most)
    return Task(input_ids, question, fact)


@torch.inference_mode()
def _answer(
    name: str,
    cache: Any,
    model: Any,
    words: Any,
    task: Task,
    options: DemoOptions,
    work: Work,
) -> Answer:
    """Reads the prompt piece by piece, so that a bar can move, and then generates."""
    ids = task.input_ids
    passed_as = {cache_kwarg(model): cache}
    # The last token is left to `generate`, which needs one to start from.
    to_read = ids.shape[1] - 1
    work.stage(f"{name}: reading the text", to_read, keep=True)
    start, done = time.perf_counter(), 0
    for piece in ids[:, :to_read].split(PREFILL_CHUNK, dim=1):
        model(input_ids=piece, logits_to_keep=1, use_cache=True, **passed_as)
        done += piece.shape[1]
        work.move(done)
    prefill_seconds = time.perf_counter() - start

    work.stage(f"{name}: answering", options.max_new_tokens, keep=True)
    clock = Clock(work)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        streamer=clock,
        **passed_as,
    )
    new = output[0, ids.shape[1] :].tolist()
    return Answer(
        text=words.decode(new, skip_special_tokens=True).strip(),
        tokens=new,
        prefill_seconds=prefill_seconds,
        ms_per_token=clock.ms_per_token,
    )
