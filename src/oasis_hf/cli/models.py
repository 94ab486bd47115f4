"""`oasis-hf models`: which models of the installed Transformers the cache serves."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import mistake
from .terminal import Work, console, working

if TYPE_CHECKING:
    from rich.console import Console

    from ..tools.survey import Verdict

STYLES = {"exact": "green", "delegated in part": "green", "WRONG": "bold red"}
ORDER = ("exact", "delegated in part", "refused", "not testable", "WRONG")


def models(
    name: Annotated[
        str, typer.Option("--filter", help="Only types or classes with this in their name.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    timeout: Annotated[
        int, typer.Option(help="Seconds after which a model is given up.", min=1)
    ] = 60,
) -> None:
    """Try every causal language model of the installed Transformers, tiny and random.

    exact: all layers are offloaded, and at full budget logits and greedy tokens are those of eager
    attention with DynamicCache. delegated in part: the same, but sliding and linear layers are left
    to Transformers. refused: OasisCache raises an error with this reason. not testable: no tiny
    model can be built, or it fails with its own cache. WRONG: a bug; please report it.
    """
    import warnings

    from transformers.utils import logging

    from ..tools import tiny

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    wanted = name.lower()
    types = [
        kind
        for kind in tiny.model_types()
        if wanted in kind.lower() or wanted in tiny.class_name(kind).lower()
    ]
    if not types:
        raise mistake(
            "--filter", name, "a part of a model type or class of the installed Transformers"
        )
    with working("trying models", remaining=True) as work:
        verdicts = list(_verdicts(types, timeout, work))
    if as_json:
        typer.echo(_as_json(verdicts))
    else:
        _print(verdicts, console())
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


def _verdicts(types: list[str], timeout: int, work: Work) -> Iterator[Verdict]:
    from ..tools import tiny
    from ..tools.survey import Verdict, survey

    work.stage("trying models", len(types))
    for number, kind in enumerate(types):
        work.move(number, what=kind)
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


def _print(verdicts: list[Verdict], shown: Console) -> None:
    """A table; what is to be said of a model stands below its row, as wide as the terminal."""
    from rich.padding import Padding
    from rich.text import Text

    wide = max(len("model type"), *(len(verdict.model_type) for verdict in verdicts))
    status = max(len("verdict"), *(len(verdict.status) for verdict in verdicts))
    shown.print(f"{'model type':<{wide}}  {'verdict':<{status}}  offloaded  native  largest error")
    shown.print("─" * min(shown.width, wide + status + 36))
    for verdict in verdicts:
        row = Text(f"{verdict.model_type:<{wide}}  ")
        style = STYLES.get(verdict.status, "yellow")
        row.append(f"{verdict.status:<{status}}", style=style)
        if verdict.offloaded:
            row.append(f"  {verdict.offloaded:>9}  {verdict.native:>6}  {verdict.error:>13.0e}")
        shown.print(row)
        if verdict.detail:
            shown.print(Padding(Text(verdict.detail, style="dim"), (0, 0, 0, 4)))
    shown.print()
    counts = Counter(verdict.status for verdict in verdicts)
    shown.print(", ".join(f"{counts[status]} {status}" for status in ORDER if counts[status]))
    shown.print(", ".join(f"{package} {number}" for package, number in _versions().items()))
