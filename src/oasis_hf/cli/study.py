"""`oasis-hf study`: smaller studies of the evaluation, each with one file of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .evaluate import fail, require

RESULTS = Path("eval/results")
INDEXES = "keys2bit,minmax,oracle,streaming,mean"

Threads = Annotated[int | None, typer.Option(help="CPU threads.", min=1)]
Budgets = Annotated[str, typer.Option(help="Tokens attended to per KV head.")]
Indexes = Annotated[str, typer.Option(help="Names, or module:Class of your own.")]
Model = Annotated[str, typer.Option(help="A Hub id or a folder; the packaged SmolLM2 by default.")]

study = typer.Typer(
    help="Smaller studies: needles over budgets, attention held, drafts, the retrieval model.",
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
    require("study needles")
    _use(threads)
    from oasis_eval.needles.run import Settings, run

    if quick:
        contexts, budgets, policies, needles = "2048", "128,256", "fetch", 4
    name = "needles-quick.json" if quick else "needles.json"
    try:
        settings = Settings(
            contexts=_numbers("contexts", contexts),
            budgets=_numbers("budgets", budgets),
            indexes=_words("indexes", indexes),
            policies=_words("policies", policies),
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
        run(settings, out or RESULTS / name, resume, _say)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        fail("study needles", error)


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
    require("study attention")
    _use(threads)
    from oasis_eval.studies.attention_held import run

    try:
        chosen = _numbers("budgets", budgets), _words("indexes", indexes)
        run(out, context, steps, *chosen, model, _say)
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError) as error:
        fail("study attention", error)


@study.command(name="draft-budget")
def draft_budget(
    context: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 4096,
    rows: Annotated[int, typer.Option(help="Prompts, consecutive pieces of the text.", min=1)] = 4,
    new: Annotated[int, typer.Option(help="Tokens generated after each.", min=1)] = 64,
    length: Annotated[int, typer.Option(help="Tokens drafted per round.", min=1)] = 4,
    budgets: Annotated[str, typer.Option(help="Of the draft's cache.")] = "2048,1024,512,256,128",
    text: Annotated[str, typer.Option(help="As in oasis-hf eval --text.")] = "reference",
    out: Annotated[Path, typer.Option(help="The results.")] = RESULTS / "draft-budget.json",
    threads: Threads = None,
) -> None:
    """What does it cost in acceptance that a draft attends to a bounded number of tokens?"""
    require("study draft-budget")
    _use(threads)
    from oasis_eval.studies.draft_budget import run

    try:
        run(out, context, rows, new, length, _numbers("budgets", budgets), text, _say)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        fail("study draft-budget", error)


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
    require("study retrieval-model")
    _use(threads)
    from oasis_eval.retrieval.train import make

    try:
        make(out, seed, random, device, _numbers("lengths", lengths), asked)
    except ValueError as error:
        fail("study retrieval-model", error)


def _say(text: str) -> None:
    """A line of what is done, at once."""
    print(text, flush=True)


def _use(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def _words(option: str, text: str) -> tuple[str, ...]:
    """The words of a list.

    Raises:
        ValueError: there are none.
    """
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise ValueError(f"--{option}: got {text!r}, expected words with commas between")
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """The whole numbers of a list, in its order.

    Raises:
        ValueError: there are none, or one is no positive whole number.
    """
    found = _words(option, text)
    for word in found:
        if not word.isdecimal() or not int(word):
            raise ValueError(f"--{option}: got {word!r}, expected whole numbers such as 256,512")
    return tuple(map(int, found))
