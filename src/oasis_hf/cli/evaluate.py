"""`oasis-hf eval` and `oasis-hf report`: answers under sparse attention, beside dense ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import checks
from .checks import output_file, output_folder
from .errors import Failure, Mistake, option_of
from .page import fitted
from .terminal import Work, console, working

FLAGS = {"answer_tokens": "--cut"}
"""Options that have another name than what they set."""
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
    with working("loading the evaluation") as work:
        require(*PACKAGES)
        import torch

        from oasis_eval.config import ConfigError, resolve
        from oasis_eval.reports.page import write_report
        from oasis_eval.runs.run import check_folder, run

        flags: dict[str, Any] = {
            "model": model,
            "tasks": tasks,
            "contexts": contexts,
            "arms": arms,
            "text": text,
        }
        flags |= {"samples": samples, "seed": seed, "dtype": dtype, "answer_tokens": cut}
        # What comes from a file is named as in the file.
        names = {
            key: FLAGS.get(key, f"--{key}") for key, given in flags.items() if given is not None
        }
        names |= {"preset": "--preset", "config": "--config", "out": "--out"}
        if threads:
            torch.set_num_threads(threads)
        try:
            chosen = resolve(preset, config, flags)
            folder = out or Path("oasis-eval") / f"{preset or 'run'}-{chosen.digest}"
            output_folder("--out", folder)
            check_folder(chosen, folder)
            _check(chosen, work)
        except ConfigError as error:
            raise option_of(error, names) from error
        work.stage("loading the model")
    with working("reading the first prompt", remaining=True) as work:
        try:
            limit = None if minutes is None else 60 * minutes
            run(chosen, folder, _updating(work), batch=batch, seconds=limit)
        except ConfigError as error:
            raise option_of(error, names) from error
        except ModuleNotFoundError as error:
            raise Failure(str(error)) from error
        work.stage("writing the report")
        page = write_report(folder)
    show_page(page.read_text(encoding="utf-8"))
    typer.echo(f"written to {folder}")


def _check(chosen: Any, work: Work) -> None:
    """All that would stop a run later: the text, the model, its arms, and tasks that do not fit."""
    from oasis_eval.runs.checks import check_arms, check_tasks
    from oasis_eval.runs.run import check_length

    text = real_text(chosen.text)
    work.stage("looking for the model")
    config, words = checks.model_parts("--model", chosen.model, work.stage)
    check_length(config, chosen)
    check_arms(config, chosen)
    work.stage("checking that the tasks fit")
    check_tasks(words, chosen, text)


def real_text(source: str) -> str:
    """What `--text` names, or the best text that there is."""
    from oasis_eval.material.texts import available, read_text

    try:
        return read_text(source or available())
    except (OSError, ValueError) as error:
        raise Mistake(f"--text: got {source!r}: {error}") from error


def show_page(page: str) -> None:
    """Print Markdown no wider than the terminal."""
    typer.echo(fitted(page, console().width))


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
        Path | None, typer.Option(help="Add the answers that oasis_eval.peers wrote there.")
    ] = None,
) -> None:
    """Compare two runs of `oasis-hf eval`, or write one run's report anew."""
    if second is not None and (prompts or peers):
        raise Mistake(
            f"second: got {second}, expected one run with --prompts or --peers; leave it out"
        )
    if prompts and peers:
        raise Mistake(
            f"--peers: got {peers} together with --prompts, which only writes; leave one out"
        )
    output_file("--out", out)
    output_file("--prompts", prompts)
    with working("loading the evaluation") as work:
        require(*PACKAGES)
        from oasis_eval.peers.answers import merge, write_prompts
        from oasis_eval.records import load_run
        from oasis_eval.reports.compare import compare
        from oasis_eval.reports.page import write_report

        try:
            for folder in (first, *([second] if second else [])):
                load_run(folder)
            work.stage("making the report" if prompts is None else "making the prompts anew")
            if prompts is not None:
                count = write_prompts(first, prompts)
            elif second is not None:
                text = compare(first, second)
            else:
                if peers is not None:
                    merge(first, peers)
                text = write_report(first).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise Mistake(str(error)) from error
    if prompts is not None:
        typer.echo(f"{count} prompts written to {prompts}")
        return
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    show_page(text)


def require(*packages: str) -> None:
    """End with the command that installs what is missing."""
    from importlib.util import find_spec

    missing = [name for name in ("oasis_eval", *packages) if find_spec(name) is None]
    if missing:
        raise Failure(f"needs {', '.join(missing)}; run: {NEEDED}")


def _updating(work: Work) -> Any:
    """A function that shows each result; without a terminal, a line where an arm has answered."""
    values: list[float] = []

    def update(done: int, total: int, record: dict[str, Any]) -> None:
        value = record["score"] if "score" in record else record["loss"]
        values.append(value)
        what = f"{record['task']} {record['context']:,} {record['arm']}"
        work.move(done, total, f"{what}: {value:.2f}")
        if len(values) < record["rows"] and done < total:
            return
        if work.bars is None:
            work.line(
                f"{done}/{total} {what}: {sum(values) / len(values):.3f}, "
                f"{record['seconds'] * len(values):.1f} s"
            )
        values.clear()

    return update
