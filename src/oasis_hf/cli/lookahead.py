"""`oasis-hf lookahead`: which predictor has wanted blocks resident in time, beside LRU alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import INDEX_NAMES
from ..geometry import round_up
from .checks import (
    each,
    fits,
    found_model,
    model_config,
    numbers,
    output_file,
    output_folder,
    positions,
    tokenizer,
    words,
)
from .errors import Mistake, mistake, option_of
from .replays import added, environment, show
from .terminal import Work, console, working

if TYPE_CHECKING:
    from ..tools.lab import Grid, Recording
    from ..tools.lab.session import Setup

EXIT_LAYERS, LEFT_OUT = 28, 2
"""Layers of an early exit, and those that it leaves out at least, unless the user says."""
MOST_DRAFTS = 31
"""Rows of a verification less one."""


def lookahead(
    texts: Annotated[
        str,
        typer.Option(help="Some of prose, code, needles."),
    ] = "code,prose",
    runs: Annotated[
        str,
        typer.Option(
            help="Generations: one token a step with a probe row that is the right token (right), "
            "one of the first layers (exit-probe), or the right one over a working set (sparse); "
            "verifications of prompt lookup (lookup) or of the first layers' drafts (exit)."
        ),
    ] = "right,exit-probe,lookup,exit",
    predictors: Annotated[
        str, typer.Option(help="Beside lru and oracle; '+' joins two.")
    ] = "last,rows,past,ngram,draft,layer,draft+layer",
    indexes: Annotated[
        str,
        typer.Option(help="The first is swept over, others are compared."),
    ] = "keys2bit,minmax",
    budgets: Annotated[str, typer.Option(help="Tokens attended to per KV head.")] = "512,2048",
    context: Annotated[int, typer.Option(help="Tokens read before.", min=64)] = 6144,
    tokens: Annotated[int, typer.Option(help="Tokens decoded.", min=3)] = 96,
    drafts: Annotated[
        int, typer.Option(help="Drafts per verification at most.", min=1, max=MOST_DRAFTS)
    ] = 5,
    exit_layers: Annotated[
        int | None,
        typer.Option(
            help="Layers of an early exit: 28, or all but two of the model's by default.", min=1
        ),
    ] = None,
    greedy: Annotated[
        bool, typer.Option(help="Decode what the model says instead of what the text does.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="A Hub id or a folder; the packaged SmolLM2 by default.")
    ] = "",
    recordings: Annotated[
        Path | None, typer.Option(help="Folder of recordings, used again where they fit.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option(help="Other caps, head-rooms, policies and indexes as well.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    add: Annotated[bool, typer.Option(help="Keep what the JSON has of other texts.")] = False,
    seed: Annotated[int, typer.Option(help="Of the needles.")] = 0,
) -> None:
    """Record a model's queries and keys on real text once; replay what would have been resident.

    Recall is the share of the blocks that the index wants in a step which are resident when it
    begins, at the same number of slots for every predictor.
    """
    from transformers.utils import logging

    from ..tools.lab import measure
    from ..tools.lab.session import RUNS, Setup
    from ..tools.lab.texts import TEXTS
    from ..tools.packaged import cache_home

    chosen = words("--texts", texts, TEXTS)
    wanted = words("--runs", runs, RUNS)
    grid = _grid(predictors, indexes, budgets, sweep)
    folder = recordings or cache_home() / "lookahead"
    output_folder("--recordings", folder)
    output_file("--out", out)
    earlier = _earlier(out, add)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    about: list[dict[str, Any]] = []
    with working("looking for the model") as work:
        source = found_model("--model", model, work.stage)
        depth = _layers(source, context + tokens + drafts, exit_layers)
        setups = [
            Setup(
                text,
                context,
                tokens,
                drafts,
                depth,
                sparse_budget=grid.budgets[0],
                greedy=greedy,
                seed=seed,
            )
            for text in chosen
        ]
        work.stage("reading the texts")
        _check_texts(setups, source)
        for setup in setups:
            _held(setup, source, folder)
        for setup in setups:
            recording = _recording(setup, wanted, source, folder, work)
            about.append(recording.about)
            rows += measure(recording, grid, work.log)
    show(rows, console())
    if out is not None:
        report = {"about": environment() | {"recordings": about}, "rows": rows}
        if earlier is not None:
            report = added(earlier, report)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report) + "\n", encoding="utf-8")


# ---- options, before any work ------------------------------------------------------------------


def _grid(predictors: str, indexes: str, budgets: str, sweep: bool) -> Grid:
    """What is compared."""
    from ..lookahead import predictor
    from ..tools.lab import Grid
    from ..tools.lab.replay import LRU
    from ..tools.lab.scores import Layout

    names = words("--predictors", predictors)
    if LRU in names:
        raise mistake("--predictors", LRU, "predictors beside it: it is always there, leave it out")
    each("--predictors", names, predictor)
    block = Layout.block_size
    grid = Grid(
        predictors=names,
        indexes=words("--indexes", indexes, INDEX_NAMES),
        # As a cache rounds its budget.
        budgets=tuple(round_up(budget, block) for budget in numbers("--budgets", budgets, 1)),
    )
    if sweep:
        return grid
    return dataclasses.replace(grid, indexes=grid.indexes[:1], swept_runs=())


def _earlier(out: Path | None, add: bool) -> dict[str, Any] | None:
    """The report that is added to, if there is one."""
    if not add:
        return None
    if out is None:
        raise Mistake("--add: got no file to add to; name it with --out FILE")
    if not out.is_file():
        return None
    try:
        report = json.loads(out.read_text(encoding="utf-8"))
        added(report, {"about": {"recordings": [], "command": ""}, "rows": []})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise mistake(
            "--out", out, "a report of this command to --add to; leave --add out to replace it"
        ) from error
    return report


def _layers(source: str | Path, needed: int, exit_layers: int | None) -> int:
    """Layers of an early exit, in a model of full attention that has positions for all tokens."""
    from ..facts import compat

    config = model_config("--model", source)
    layers = compat.native_layers(config)
    if not all(compat.is_full_attention(layer) for layer in layers):
        raise mistake("--model", str(source), "a model with full attention in all of its layers")
    depth = len(layers)
    if exit_layers is None:
        exit_layers = max(1, min(EXIT_LAYERS, depth - LEFT_OUT))
    if exit_layers > depth:
        raise mistake("--exit-layers", exit_layers, f"1 to {depth}, the layers of the model")
    most = positions(config)
    over = needed - (most or needed)
    fits(most, "--context, --tokens and --drafts", needed, f"lower --context by {over}")
    return exit_layers


def _check_texts(setups: list[Setup], source: str | Path) -> None:
    """That the texts are as long as is asked for."""
    from ..tools.lab.texts import text_ids

    ids = tokenizer("--model", source)
    for setup in setups:
        try:
            text_ids(setup.text, ids, setup.context, setup.following, setup.seed)
        except ValueError as error:
            raise option_of(error, {"context": "--context", "text": "--texts"}) from error


# ---- recordings --------------------------------------------------------------------------------


def _path(setup: Setup, folder: Path) -> Path:
    return folder / f"{setup.name.replace(', ', '-')}-{setup.context}.safetensors"


def _held(setup: Setup, source: str | Path, folder: Path) -> Recording | None:
    """The recording of this setup that the folder has."""
    from ..tools.lab import Recording

    path = _path(setup, folder)
    if not path.is_file():
        return None
    try:
        recording = Recording.load(path)
    except ValueError as error:
        raise Mistake(f"--recordings: {error}") from error
    wanted = vars(setup) | {"text": setup.name, "model": Path(str(source)).name}
    return recording if recording.about | wanted == recording.about else None


def _recording(
    setup: Setup,
    runs: tuple[str, ...],
    source: str | Path,
    folder: Path,
    work: Work,
) -> Recording:
    """A recording of this setup with these runs: the one that is there, or made now and saved."""
    import torch

    from ..tools.lab.session import record
    from ..tools.packaged import load

    held = _held(setup, source, folder)
    if held is not None and set(runs) <= set(held.runs):
        return _only(held, runs)
    work.stage("loading the model")
    llm, tokens = load(source, dtype=torch.float32, device_map="cpu")
    recording = held
    for so_far in record(llm, tokens, setup, runs, held, work.log):
        so_far.save(_path(setup, folder))
        recording = so_far
    assert recording is not None
    return _only(recording, runs)


def _only(recording: Recording, runs: tuple[str, ...]) -> Recording:
    """The recording with these runs, in this order."""
    return dataclasses.replace(recording, runs={name: recording.runs[name] for name in runs})
