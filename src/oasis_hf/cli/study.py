"""`oasis-hf study`: smaller studies of the evaluation, each with one file of results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from . import checks
from .checks import fits, numbers, output_file, output_folder, positions, words
from .errors import Commands, Failure, Mistake, mistake, option_of
from .evaluate import real_text, require
from .lookahead import MOST_DRAFTS
from .terminal import Work, working

RESULTS = Path("eval/results")
SHORTEST = 128
"""Tokens of the shortest context of a study."""
FEWEST = 16
"""Tokens of the smallest budget that holds the sinks."""
INDEXES = "keys2bit,minmax,oracle,streaming,mean"

Threads = Annotated[int | None, typer.Option(help="CPU threads.", min=1)]
Budgets = Annotated[str, typer.Option(help="Tokens attended to per KV head.")]
Indexes = Annotated[str, typer.Option(help="Names, or module:Class of your own.")]
Model = Annotated[str, typer.Option(help="A Hub id or a folder; the packaged SmolLM2 by default.")]

study = typer.Typer(
    cls=Commands,
    help="Smaller studies: needles, attention held, indexes, drafts, the retrieval model.",
    no_args_is_help=True,
)


@study.command()
def needles(
    contexts: Annotated[
        str, typer.Option(help="Lengths of the prompt and its answer.")
    ] = "4096,8192",
    budgets: Budgets = "128,256,512,1024,2048",
    indexes: Indexes = INDEXES,
    policies: Annotated[
        str, typer.Option(help="fetch, skip, or a number: fetch above that share.")
    ] = "fetch,skip,0.01",
    needles: Annotated[
        int, typer.Option(help="In each cell, all answered by dense attention.", min=1)
    ] = 16,
    rows: Annotated[int, typer.Option(help="Prompts read and answered together.", min=1)] = 4,
    text: Annotated[
        str, typer.Option(help="austen, essays, reference or a file; the first there is.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of cities, numbers and places.")] = 0,
    model: Model = "",
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16; what the machine is fast in.")
    ] = "",
    options: Annotated[
        str, typer.Option(help="More of every arm, such as block_size=8/head_room=1.")
    ] = "",
    lead_in: Annotated[
        bool, typer.Option(help="Give the start of the answer, as RULER does.")
    ] = True,
    every: Annotated[
        bool, typer.Option(help="All combinations, not only the informative ones.")
    ] = False,
    quick: Annotated[
        bool, typer.Option(help="4 needles, 2K, two budgets: some minutes, not for the README.")
    ] = False,
    resume: Annotated[
        bool, typer.Option(help="Keep the answers of an earlier run with the same prompts.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The summary; the log of answers lies next to it.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Which index, at which budget, still finds a fact that dense attention finds in real prose?

    `oasis-hf tables needles` prints the table.
    """
    if quick:
        contexts, budgets, policies, needles = "2048", "128,256", "fetch", 4
    file = out or RESULTS / ("needles-quick.json" if quick else "needles.json")
    lengths, sizes = numbers("--contexts", contexts, SHORTEST), numbers("--budgets", budgets, 1)
    names = words("--indexes", indexes), words("--policies", policies)
    with _studying(file, threads) as work:
        from oasis_eval.needles.haystack import Haystack
        from oasis_eval.needles.run import Settings, run

        settings = Settings(
            contexts=lengths,
            budgets=sizes,
            indexes=names[0],
            policies=names[1],
            needles=needles,
            rows=rows,
            text=text,
            seed=seed,
            model=model,
            dtype=dtype,
            options=options,
            lead_in=lead_in,
            every=every,
        )
        try:
            settings.check()
        except ValueError as error:
            named = {name: f"--{name}" for name in ("dtype", "policies")}
            raise option_of(error, named) from error
        prose = real_text(text)
        config, tokens = checks.model_parts("--model", model, work.stage)
        fits(positions(config), "--contexts", max(lengths), "use shorter contexts")
        for length in lengths:
            try:
                Haystack(tokens, prose, length, seed, lead_in).batch(0, min(rows, needles))
            except ValueError as error:
                raise Mistake(f"--contexts: got {length}: {error}") from error
        work.stage("loading the model")
        run(settings, file, resume, work.line)


@study.command()
def attention(
    context: Annotated[int, typer.Option(help="Tokens of code.", min=256)] = 4096,
    steps: Annotated[int, typer.Option(help="Last tokens that are replayed.", min=1)] = 48,
    budgets: Budgets = "128,256,512,1024",
    indexes: Annotated[str, typer.Option(help="What ranks the blocks.")] = INDEXES,
    model: Model = "",
    out: Annotated[Path, typer.Option(help="The results.")] = RESULTS / "needles-mass.json",
    threads: Threads = None,
) -> None:
    """How much of the true attention do the chosen blocks hold, on real code, teacher-forced?

    `oasis-hf tables needles-mass` prints the table.
    """
    sizes, names = numbers("--budgets", budgets, 1), words("--indexes", indexes)
    with _studying(out, threads) as work:
        from oasis_eval.studies.attention_held import choices, code, run

        try:
            for choice in choices(sizes, names):
                _ = choice.config
        except (TypeError, ValueError) as error:
            raise option_of(error, {"index": "--indexes", "budget": "--budgets"}) from error
        if steps >= context:
            raise Mistake(f"--steps: got {steps}, expected fewer than the context, {context}")
        config, tokens = checks.model_parts("--model", model, work.stage)
        fits(positions(config), "--context", context, "use a shorter one")
        _holds("--context", code(tokens, context).shape[1], context)
        work.stage("loading the model")
        run(out, context, steps, sizes, names, model, work.line)


@study.command()
def index(
    context: Annotated[int, typer.Option(help="Tokens of a prompt and its answer.", min=1)] = 4096,
    samples: Annotated[int, typer.Option(help="Prompts, each drawn anew.", min=1)] = 4,
    budgets: Budgets = "2048,512",
    indexes: Indexes = "oracle,pca,keys2bit,minmax",
    task: Annotated[str, typer.Option(help="One of RULER's, by name.")] = "niah_multikey_3",
    text: Annotated[str, typer.Option(help="As in oasis-hf eval --text.")] = "reference",
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    model: Model = "",
    out: Annotated[Path, typer.Option(help="The results.")] = RESULTS / "alike-needles.json",
    threads: Threads = None,
) -> None:
    """Which index finds one needle among thousands of alike ones?

    Teacher-forced on the right answer: its log probability, the share of its tokens that are the
    model's first choice, and differences of the former to dense attention and to the oracle, with
    95 % intervals over samples.
    """
    sizes, names = numbers("--budgets", budgets, FEWEST), words("--indexes", indexes)
    with _studying(out, threads) as work:
        require("datasets")
        from oasis_eval.material.texts import source_name
        from oasis_eval.studies.alike_needles import arms, ask, run
        from oasis_eval.tasks import RULER

        if task not in RULER:
            raise mistake("--task", task, f"one of {', '.join(RULER)}")
        try:
            compared = arms(names, sizes)
        except ValueError as error:
            raise option_of(error, {"arms": "--indexes"}) from error
        prose = real_text(text)
        config, tokens = checks.model_parts("--model", model, work.stage)
        fits(positions(config), "--context", context, "use a shorter one")
        work.stage("drawing the prompts")
        try:
            asked = ask(tokens, task, context, samples, seed, prose)
        except ValueError as error:
            said = str(error).replace("context: ", "")
            raise Mistake(f"--context: {said}") from error
        work.stage("loading the model")
        made = {"task": task, "context": context, "samples": samples, "seed": seed}
        made["text"] = source_name(text)
        found = run(out, asked, compared, made, model, work.line)
    typer.echo(found)


@study.command(name="draft-budget")
def draft_budget(
    context: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 4096,
    rows: Annotated[int, typer.Option(help="Prompts, consecutive pieces of the text.", min=1)] = 4,
    new: Annotated[int, typer.Option(help="Tokens generated after each.", min=1)] = 64,
    length: Annotated[
        int, typer.Option(help="Tokens drafted per round.", min=1, max=MOST_DRAFTS)
    ] = 4,
    budgets: Annotated[str, typer.Option(help="Of the draft's cache.")] = "2048,1024,512,256,128",
    text: Annotated[str, typer.Option(help="As in oasis-hf eval --text.")] = "reference",
    out: Annotated[Path, typer.Option(help="The results.")] = RESULTS / "draft-budget.json",
    threads: Threads = None,
) -> None:
    """What does it cost in acceptance that a draft attends to a bounded number of tokens?"""
    sizes = numbers("--budgets", budgets, 1)
    with _studying(out, threads) as work:
        from oasis_eval.studies.draft_budget import run

        prose = real_text(text)
        config, tokens = checks.model_parts("--model", None, work.stage)
        fits(positions(config), "--context and --new", context + new, "use fewer tokens")
        held = len(tokens(prose, verbose=False).input_ids)
        _holds("--rows and --context", held, rows * context)
        work.stage("loading the model")
        run(out, context, rows, new, length, sizes, text, work.line)


@study.command(name="retrieval-model")
def retrieval_model(
    out: Annotated[Path, typer.Option(help="Folder of the model.")] = Path("retrieval-model"),
    seed: Annotated[int, typer.Option(help="Of the weights and of what is drawn.")] = 0,
    random: Annotated[
        bool, typer.Option(help="Begin with random weights, without the two heads.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where to train, such as cuda.")] = "cpu",
    lengths: Annotated[
        str, typer.Option(help="Tokens at which accuracy is measured.")
    ] = "256,1024,4096,8192",
    asked: Annotated[int, typer.Option(help="Questions of a measurement.", min=1)] = 128,
    threads: Threads = None,
) -> None:
    """Train the small model that eval/configs/retrieval.yaml evaluates at 32K and 128K tokens."""
    chosen = numbers("--lengths", lengths, SHORTEST)
    output_folder("--out", out)
    checks.device("--device", device)
    with _studying(None, threads) as work:
        from oasis_eval.retrieval.train import make

        work.stage("making the model")
        make(out, seed, random, device, chosen, asked, work.line)


def _holds(option: str, held: int, needed: int) -> None:
    """That a text has the tokens that are read of it."""
    if held < needed:
        raise Mistake(
            f"{option}: got {needed:,} tokens in all, expected at most {held:,}, which the text has"
        )


@contextmanager
def _studying(out: Path | None, threads: int | None) -> Iterator[Work]:
    """Shows that a study is at work; its options are checked, and what it needs is there."""
    output_file("--out", out)
    with working("loading the evaluation") as work:
        require()
        if threads:
            import torch

            torch.set_num_threads(threads)
        try:
            yield work
        except ModuleNotFoundError as error:
            raise Failure(str(error)) from error
