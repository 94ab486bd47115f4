"""`oasis-hf bench`: decode steps on random weights, beside measured ceilings and Transformers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from ..config import DEFAULT_CAP, INDEX_NAMES, OasisConfig
from .checks import each, model_source, numbers, output_file, words
from .errors import Failure, Mistake, mistake, option_of
from .rows import fitted, line
from .terminal import console, working

OPTIONS = {
    "arms": "--arms",
    "acceptance": "--acceptance",
    "block_size": "--block-sizes",
    "block_sizes": "--block-sizes",
    "budget": "--budgets",
    "budgets": "--budgets",
    "caps": "--caps",
    "compile": "--compile",
    "drafts": "--drafts",
    "fetch_cap": "--caps",
    "index": "--indexes",
    "on_miss": "--policies",
    "shape": "--shape",
}
"""Options, by the names that errors of the plan begin with."""


def bench(
    shape: str = typer.Option(
        "llama-3.1-8b",
        help="A decoder's sizes: llama-3.1-8b, qwen3-8b, qwen3-0.6b, a Hub id or a folder with a "
        "config.json; weights are random.",
    ),
    arms: str = typer.Option(
        "oasis,dense,static,offloaded",
        help="Oasis, and Transformers' caches: DynamicCache, StaticCache in a CUDA graph, and "
        "offloaded.",
    ),
    budgets: str = typer.Option("2048,512", help="Budgets; the first is that of the base case."),
    indexes: str = typer.Option("keys2bit,minmax", help="Indexes, the base case's first."),
    policies: str = typer.Option("skip,fetch", help="Miss policies, the base case's first."),
    block_sizes: str = typer.Option(
        str(OasisConfig.block_size),
        help="Tokens per block, or auto; the base case's first, the others with every budget and "
        "policy.",
    ),
    caps: str = typer.Option(
        f"{DEFAULT_CAP:g}",
        help=f"Values of fetch_cap: shares, none, auto, or 0 for no lookahead; the base case has "
        f"{DEFAULT_CAP:g} if that is one of them.",
    ),
    compiles: str = typer.Option(
        "off,on", "--compile", help="Compile the model's own work: off, on, or both."
    ),
    prompts: str = typer.Option("", help="Prompt lengths whose time to first token is taken."),
    profile: bool = typer.Option(False, help="Profile the kernels of each base case."),
    drafts: int = typer.Option(0, help="Drafts that a round verifies, beside plain decoding."),
    acceptance: str = typer.Option(
        "0.6,0.8,0.95",
        help="Probabilities that a draft is accepted, which are set, not found; or lookup: drafts "
        "are looked up in a scripted text, and accepted where it goes on as they do.",
    ),
    heat: float | None = typer.Option(
        None, help="How alike the choices of one step and the next are, 4 by default; 1 is little."
    ),
    steps: int = typer.Option(40, help="Decode steps timed per case.", min=1),
    sizes: str = typer.Option(
        "", help="Sequences x tokens of context of each, such as 1x131072,8x32768; four by default."
    ),
    quick: bool = typer.Option(False, help="One small size."),
    out: Path | None = typer.Option(None, help="Where the JSON goes."),
) -> None:
    """Measure ceilings, then decode steps; no speed is reported unless the engines agree.

    The first value of each option makes the base case of a size; every other value is measured as
    one change to it. Further budgets are measured at the first size only. With cap 0 among --caps,
    rows say how much of their background fetches shows in the time of a step.
    """
    import torch

    from ..tools.bench import Choices, plan, run
    from ..tools.bench.gate import GateFailedError
    from ..tools.bench.plan import ARMS, LOOKUP, QUICK, SIZES
    from ..tools.bench.workload import SHAPES, shape_sizes

    if quick and sizes:
        raise mistake("--sizes", sizes, "none beside --quick, which is one size; leave one out")
    chosen = each("--sizes", _words(sizes), _batch_and_context)
    shares = each(
        "--acceptance",
        words("--acceptance", acceptance),
        lambda word: word if word == LOOKUP else _number("--acceptance", word, "a probability"),
    )
    if heat is not None and not 0 <= heat < math.inf:
        raise mistake("--heat", heat, "a number from 0 on, such as 4; 1 is little")
    try:
        choices = Choices(
            budgets=numbers("--budgets", budgets, 1),
            indexes=words("--indexes", indexes, INDEX_NAMES),
            policies=each("--policies", words("--policies", policies), _policy),
            caps=each("--caps", words("--caps", caps), _cap),
            compile=each("--compile", words("--compile", compiles), _switch),
            block_sizes=each("--block-sizes", words("--block-sizes", block_sizes), _block),
        )
        cases = plan(
            chosen or (QUICK if quick else SIZES),
            words("--arms", arms, ARMS),
            choices,
            steps,
            drafts,
            shares,
        )
    except ValueError as error:
        raise option_of(error, OPTIONS) from error
    if not cases:
        raise mistake(
            "--arms", arms, "one that the sizes have room for; add oasis, or choose a smaller size"
        )
    if heat is not None:
        cases = [replace(case, heat=heat) for case in cases]
    lengths = list(numbers("--prompts", prompts, 1)) if _words(prompts) else []
    output_file("--out", out)
    if shape not in SHAPES and not Path(shape).is_dir():
        with working("looking for the shape"):
            try:
                model_source("--shape", shape)
            except Mistake as error:
                raise type(error)(f"{error}; or one of {', '.join(SHAPES)}") from error
    try:
        shape_sizes(shape)
    except ValueError as error:
        raise option_of(error, OPTIONS) from error
    if not torch.cuda.is_available():
        raise Mistake(
            "needs a CUDA device: got none; run it on a machine with a GPU. Correctness needs "
            "none: pytest tests/test_triton_engine.py"
        )
    shown = console()

    def report(row: dict[str, Any], record: dict[str, Any]) -> None:
        """Print a row, and keep what there is should the run break off."""
        shown.print(fitted(line(row), shown.width), soft_wrap=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1) + "\n")

    try:
        with working("checking that the engines agree, then the ceilings") as work:

            def tell(row: dict[str, Any], record: dict[str, Any]) -> None:
                work.end()
                report(row, record)
                done = len(record["rows"])
                work.stage(f"{done} of {len(cases)} cases done" if done < len(cases) else "more")

            run(shape, cases, lengths, tell, profile)
    except GateFailedError as error:
        raise Failure(str(error)) from error


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _number(option: str, text: str, expected: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise mistake(option, text, expected) from error


def _policy(text: str) -> str | float:
    if text in ("skip", "fetch"):
        return text
    return _number("--policies", text, "skip, fetch or a share of attention such as 0.01")


def _block(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() else text


def _cap(text: str) -> str | float | None:
    if text in ("none", "auto"):
        return None if text == "none" else text
    return _number("--caps", text, "none, auto or a share such as 0.05")


def _batch_and_context(text: str) -> tuple[int, int]:
    from ..tools.bench.plan import ROOM

    batch, _, context = text.partition("x")
    whole = text.isascii() and batch.isdecimal() and context.isdecimal()
    if not (whole and int(batch) and int(context) > ROOM):
        raise mistake(
            "--sizes",
            text,
            f"sequences and tokens of context, more than {ROOM}, such as 8x131072",
        )
    return int(batch), int(context)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise mistake("--compile", text, "off, on or off,on")
    return text == "on"
