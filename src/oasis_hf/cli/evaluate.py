"""`oasis-hf eval` and `oasis-hf report`: answers under sparse attention, beside dense ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

NEEDED = "pip install 'oasis-hf[eval]'"
PACKAGES = ("datasets", "evaluate")


def evaluate(
    preset: Annotated[
        str | None, typer.Option(help="tiny, smoke, ruler, long or paper: a named set of choices.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML with these options, by name; flags have precedence."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A Hub id or a folder; the packaged SmolLM2 by default.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Names, or ruler or all.")] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Tokens of prompt and answers together.")
    ] = None,
    arms: Annotated[
        str | None, typer.Option(help="INDEX/MISS/BUDGET[/OPTION=VALUE...]; dense always runs.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Of every task at every context.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything that is drawn.")] = None,
    text: Annotated[
        str | None, typer.Option(help="Real text: reference, austen, essays or a file.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    cut: Annotated[
        int | None,
        typer.Option(help="Most tokens of an answer (answer_tokens in YAML); makes runs short."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; an equal run there is completed.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Most samples read and answered together; what fits by default.", min=1),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Begin nothing after so long; the same command goes on.", min=0),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", min=1)] = None,
) -> None:
    """Let several caches answer the same prompts, and report how they compare to dense attention.

    Choices come from defaults, then the preset, then the YAML file, then flags. Every answer is
    kept at once: the same command completes what was interrupted.
    """
    require("eval", *PACKAGES)
    import torch

    from oasis_eval.config import ConfigError, resolve
    from oasis_eval.reports.page import write_report
    from oasis_eval.runs.run import run

    flags: dict[str, Any] = {
        "model": model,
        "tasks": tasks,
        "contexts": contexts,
        "arms": arms,
        "text": text,
    }
    flags |= {"samples": samples, "seed": seed, "dtype": dtype, "answer_tokens": cut}
    if threads:
        torch.set_num_threads(threads)
    try:
        chosen = resolve(preset, config, flags)
        folder = out or Path("oasis-eval") / f"{preset or 'run'}-{chosen.digest}"
        with _progress() as progress:
            limit = None if minutes is None else 60 * minutes
            run(chosen, folder, _updating(progress), batch=batch, seconds=limit)
        page = write_report(folder)
    except (ConfigError, FileNotFoundError, ModuleNotFoundError) as error:
        fail("eval", error)
    typer.echo(page.read_text(encoding="utf-8"))
    typer.echo(f"written to {folder}")


def report(
    first: Annotated[Path, typer.Argument(help="Folder of a run.")],
    second: Annotated[
        Path | None, typer.Argument(help="Folder of another run, to compare with.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the comparison goes, too.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Only write the run's prompts there, for oasis_eval.peers.")
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="Add the answers that oasis_eval.peers wrote there."),
    ] = None,
) -> None:
    """Compare two runs of `oasis-hf eval`, or write one run's report anew."""
    require("report", *PACKAGES)
    from oasis_eval.peers.answers import merge, write_prompts
    from oasis_eval.reports.compare import compare
    from oasis_eval.reports.page import write_report

    try:
        if second is not None and (prompts or peers):
            raise ValueError(
                f"second: got {second}, expected one run with --prompts or --peers; leave it out"
            )
        if prompts and peers:
            raise ValueError(
                f"peers: got {peers} together with --prompts, which only writes; leave one out"
            )
        if prompts is not None:
            typer.echo(f"{write_prompts(first, prompts)} prompts written to {prompts}")
            return
        if peers is not None:
            merge(first, peers)
        if second is None:
            text = write_report(first).read_text(encoding="utf-8")
        else:
            text = compare(first, second)
    except (FileNotFoundError, ValueError) as error:
        fail("report", error)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    typer.echo(text)


def require(command: str, *packages: str) -> None:
    """End with the command that installs what is missing."""
    from importlib.util import find_spec

    missing = [name for name in ("oasis_eval", *packages) if find_spec(name) is None]
    if missing:
        fail(command, f"needs {', '.join(missing)}; run: {NEEDED}")


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        # Contexts differ in length: the mean of a long while tells more than the last minute.
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        speed_estimate_period=600,
    )


def _updating(progress: Progress) -> Any:
    """A function that shows each result; without a terminal, a line where an arm has answered."""
    if not progress.console.is_terminal:
        return _telling()
    bar = progress.add_task("reading the first prompt", total=None)

    def update(done: int, total: int, record: dict[str, Any]) -> None:
        value = record.get("score", record.get("loss"))
        what = f"{record['task']} {record['context']:,} {record['arm']}: {value:.2f}"
        progress.update(bar, completed=done, total=total, description=what)

    return update


def _telling() -> Any:
    """A function that writes a line for the results of an arm that came together."""
    values: list[float] = []

    def update(done: int, total: int, record: dict[str, Any]) -> None:
        values.append(record["score"] if "score" in record else record["loss"])
        if len(values) < record["rows"] and done < total:
            return
        typer.echo(
            f"{done}/{total} {record['task']} {record['context']:,} {record['arm']}: "
            f"{sum(values) / len(values):.3f}, {record['seconds'] * len(values):.1f} s",
            err=True,
        )
        values.clear()

    return update


def fail(command: str, error: object) -> NoReturn:
    typer.secho(f"oasis-hf {command}: {error}", fg="red", err=True)
    raise typer.Exit(1)
