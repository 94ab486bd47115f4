"""`oasis-hf lookahead`: which predictor has wanted blocks resident in time, beside LRU alone."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..lab import Recording
    from ..lab.session import Setup

SHOWN_CAP = 0.05


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
    drafts: Annotated[int, typer.Option(help="Drafts per verification at most.", min=1)] = 5,
    exit_layers: Annotated[int, typer.Option(help="Layers of an early exit.", min=1)] = 28,
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
    from rich.console import Console

    from ..lab import Grid, measure
    from ..lab.session import Setup
    from ..packaged import cache_home

    console = Console()
    folder = recordings or cache_home() / "lookahead"
    grid = Grid(
        predictors=tuple(_words(predictors)),
        indexes=tuple(_words(indexes)),
        budgets=tuple(int(word) for word in _words(budgets)),
    )
    if not sweep:
        grid = dataclasses.replace(grid, indexes=grid.indexes[:1], swept_runs=())
    rows: list[dict[str, Any]] = []
    about: list[dict[str, Any]] = []
    try:
        for text in _words(texts):
            setup = Setup(
                text,
                context,
                tokens,
                drafts,
                exit_layers,
                sparse_budget=grid.budgets[0],
                greedy=greedy,
                seed=seed,
            )
            recording = _recording(setup, tuple(_words(runs)), model, folder, console)
            about.append(recording.about)
            rows += measure(recording, grid, console.log)
    except ValueError as error:
        typer.secho(f"oasis-hf lookahead: {error}", fg="red", err=True)
        raise typer.Exit(1) from error
    _print(rows, console)
    if out is not None:
        report = {"about": _environment() | {"recordings": about}, "rows": rows}
        if add and out.is_file():
            report = _added(json.loads(out.read_text(encoding="utf-8")), report)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report) + "\n", encoding="utf-8")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _recording(
    setup: Setup, runs: tuple[str, ...], model: str, folder: Path, console: Console
) -> Recording:
    """A recording of this setup with these runs: from its file, or made now and saved."""
    from transformers.utils import logging

    from ..lab import Recording
    from ..lab.session import record
    from ..packaged import load, smollm2

    path = folder / f"{setup.name.replace(', ', '-')}-{setup.context}.safetensors"
    source = model or smollm2()
    wanted = vars(setup) | {"text": setup.name, "model": Path(str(source)).name}
    recording = Recording.load(path) if path.is_file() else None
    if recording is not None and recording.about | wanted != recording.about:
        recording = None
    if recording is not None and set(runs) <= set(recording.runs):
        return _only(recording, runs)
    import torch

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    llm, tokenizer = load(source, dtype=torch.float32, device_map="cpu")
    for so_far in record(llm, tokenizer, setup, runs, recording, console.log):
        so_far.save(path)
        recording = so_far
    assert recording is not None
    return _only(recording, runs)


def _only(recording: Recording, runs: tuple[str, ...]) -> Recording:
    """The recording with these runs, in this order."""
    return dataclasses.replace(recording, runs={name: recording.runs[name] for name in runs})


def _added(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Two reports as one: of a text that both have, the newer runs."""
    runs = {(row["text"], row["run"]) for row in new["rows"]}
    rows = [row for row in old["rows"] if (row["text"], row["run"]) not in runs]
    texts = {recording["text"] for recording in new["about"]["recordings"]}
    kept = [x for x in old["about"]["recordings"] if x["text"] not in texts]
    commands = dict.fromkeys([old["about"]["command"], new["about"]["command"]])
    about = new["about"] | {"command": "; ".join(commands)}
    about["recordings"] = kept + new["about"]["recordings"]
    return {"about": about, "rows": rows + new["rows"]}


def _environment() -> dict[str, Any]:
    from importlib.metadata import version

    words, given = [], iter(sys.argv[1:])
    for word in given:
        if word in ("--out", "--recordings"):
            next(given)
        elif word != "--add":
            words.append(word)
    return {
        "command": shlex.join(["oasis-hf", *words]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        **{name.replace("-", "_"): version(name) for name in ("torch", "transformers")},
    }


def _print(rows: Iterable[dict[str, Any]], console: Console) -> None:
    """Predictors at equal slots, where misses are fetched; one table per text, run and budget."""
    from rich import box
    from rich.table import Table

    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        default = row["head_room"] == 2.0 and row["on_miss"] == "fetch"
        if default and row["fetch_cap"] in (None, SHOWN_CAP):
            key = tuple(row[name] for name in ("text", "run", "index", "budget"))
            groups.setdefault(key, []).append(row)
    for (text, run, index, budget), found in groups.items():
        table = Table(box=box.SIMPLE_HEAD, title=f"{text}, {run}, {index}, budget {budget:,}")
        for name in ("predictor", "cap"):
            table.add_column(name)
        for name in ("recall", "5 %", "least", "over lru", "true", "mass", "used", "kB/token"):
            table.add_column(name, justify="right")
        for row in found:
            mean, low, high = (100 * part for part in row.get("over_lru", (0, 0, 0)))
            used = row["precision"]
            table.add_row(
                row["predictor"],
                "" if row["fetch_cap"] is None else f"{row['fetch_cap']:g}",
                *(f"{row[name]:.1%}" for name in ("recall", "recall_p5", "recall_min")),
                f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]",
                f"{row['recall_true']:.1%}",
                f"{row['mass']:.1%}",
                "" if used is None else f"{used:.0%}",
                f"{(row['ahead_bytes'] + row['now_bytes'] + row['behind_bytes']) / 1e3:,.0f}",
            )
        console.print(table)
