"""`oasis-hf models`: which models of the installed Transformers the cache serves."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..survey import Verdict

STYLES = {"exact": "green", "delegated in part": "green", "WRONG": "bold red"}
ORDER = ("exact", "delegated in part", "refused", "not testable", "WRONG")


def models(
    name: Annotated[
        str, typer.Option("--filter", help="Only types or classes with this in their name.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    timeout: Annotated[int, typer.Option(help="Seconds after which a model is given up.")] = 60,
) -> None:
    """Try every causal language model of the installed Transformers, tiny and random.

    exact: all layers are offloaded, and at full budget logits and greedy tokens are those of eager
    attention with DynamicCache. delegated in part: the same, but sliding and linear layers are left
    to Transformers. refused: OasisCache raises an error with this reason. not testable: no tiny
    model can be built, or it fails with its own cache. WRONG: a bug; please report it.
    """
    import warnings

    from rich.console import Console
    from transformers.utils import logging

    from .. import tiny

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    wanted = name.lower()
    types = [
        kind
        for kind in tiny.model_types()
        if wanted in kind.lower() or wanted in tiny.class_name(kind).lower()
    ]
    if not types:
        typer.secho(
            f"oasis-hf models: --filter: got {name!r}, which no model type or class of the "
            "installed Transformers contains",
            fg="red",
            err=True,
        )
        raise typer.Exit(1)
    verdicts = list(_verdicts(types, timeout, Console(stderr=True)))
    if as_json:
        typer.echo(_as_json(verdicts))
    else:
        _print(verdicts, Console())
    if any(verdict.status == "WRONG" for verdict in verdicts):
        raise typer.Exit(1)


class _Late(BaseException):
    """A model takes too long; not an Exception, which the survey takes for the model's own."""


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise `_Late` after some seconds, where the platform and thread can."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() != threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _verdicts(types: list[str], timeout: int, console: Console) -> Iterator[Verdict]:
    from rich.progress import track

    from .. import tiny
    from ..survey import Verdict, survey

    for kind in track(types, "trying models", console=console, transient=True):
        try:
            with _limit(timeout):
                verdict = survey(kind)
        except _Late:
            detail = f"took more than {timeout} s"
            verdict = Verdict(kind, tiny.class_name(kind), detail=detail, seconds=float(timeout))
        yield verdict


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__}


def _as_json(verdicts: list[Verdict]) -> str:
    import json
    from dataclasses import asdict

    counts = Counter(verdict.status for verdict in verdicts)
    rows = [asdict(verdict) for verdict in verdicts]
    return json.dumps({"versions": _versions(), "counts": counts, "models": rows}, indent=2)


def _print(verdicts: list[Verdict], console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model type", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("offloaded", justify="right")
    table.add_column("native", justify="right")
    table.add_column("largest error", justify="right")
    table.add_column("reason or remark", overflow="fold", style="dim")
    for verdict in verdicts:
        figures = ("", "", "")
        if verdict.offloaded:
            figures = (str(verdict.offloaded), str(verdict.native), f"{verdict.error:.0e}")
        status = Text(verdict.status, style=STYLES.get(verdict.status, "yellow"))
        table.add_row(verdict.model_type, status, *figures, Text(verdict.detail))
    console.print(table)
    counts = Counter(verdict.status for verdict in verdicts)
    console.print(", ".join(f"{counts[status]} {status}" for status in ORDER if counts[status]))
    console.print(", ".join(f"{package} {number}" for package, number in _versions().items()))
