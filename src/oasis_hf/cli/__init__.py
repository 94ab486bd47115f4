"""The `oasis-hf` command. Everything heavy is imported inside the commands.

Help is plain text, without rich's markup: brackets in it are what a user types.
"""

from pathlib import Path
from typing import Annotated

import typer

from .bench import bench
from .errors import Commands
from .evaluate import evaluate, report
from .lookahead import lookahead
from .models import models
from .results import plots, tables
from .study import study

app = typer.Typer(
    name="oasis-hf",
    cls=Commands,
    help="Sparse attention over a KV cache in host memory, for Hugging Face Transformers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Sparse attention over a KV cache in host memory, for Hugging Face Transformers."""
    from ..facts.threads import bound_threads

    bound_threads()


def version() -> None:
    """Print the versions that a bug report needs."""
    import platform
    from importlib.metadata import version as installed

    from .. import __version__

    typer.echo(f"oasis-hf {__version__}")
    for package in ("transformers", "torch"):
        typer.echo(f"{package} {installed(package)}")
    typer.echo(f"python {platform.python_version()}")


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A Hub id or a folder; the packaged SmolLM2-135M-Instruct by default."),
    ] = None,
    document: Annotated[
        Path | None,
        typer.Option(
            help="A text file to ask about, instead of Python's language reference.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(help="What to ask about the document; without it, a fact is hidden in it."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the prompt: 4096 by default, or as many as the document has.", min=128
        ),
    ] = None,
    budget: Annotated[int, typer.Option(help="Tokens attended to per KV head and step.")] = 256,
    index: Annotated[str, typer.Option(help="The index that ranks the blocks.")] = "keys2bit",
    on_miss: Annotated[
        str,
        typer.Option(
            help="For a block that is wanted but not resident: 'skip' it, 'fetch' it now, or fetch "
            "it if its estimated share of the attention exceeds a number such as 0.01."
        ),
    ] = "fetch",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=2)] = 24,
) -> None:
    """Ask one question about a long text, with a dense KV cache and with Oasis."""
    from .demo import DemoOptions, run

    run(
        DemoOptions(
            model=model,
            document=document,
            question=question,
            context=context,
            budget=budget,
            index=index,
            on_miss=on_miss,
            max_new_tokens=max_new_tokens,
        )
    )


app.command(short_help="Ask one question, with a dense KV cache and with Oasis.")(demo)
app.command(short_help="Try every model class of Transformers, tiny and random.")(models)
app.command(name="eval", short_help="Let several caches answer the same prompts.")(evaluate)
app.command(short_help="Compare two runs of eval, or report on one anew.")(report)
app.add_typer(study, name="study", short_help="Smaller studies, such as needles over budgets.")
app.command(short_help="Print, write or check the tables of the pages.")(tables)
app.command(short_help="Draw all plots of the results anew.")(plots)
app.command(short_help="Time decode steps beside measured ceilings; needs a GPU.")(bench)
app.command(short_help="Replay which blocks would have been resident in time.")(lookahead)
app.command(short_help="Print the versions that a bug report needs.")(version)
