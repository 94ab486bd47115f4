"""The `oasis-hf` command. Everything heavy is imported inside the commands."""

from pathlib import Path
from typing import Annotated

import typer

from .bench import bench
from .evaluate import evaluate, report
from .lookahead import lookahead
from .models import models
from .results import plots, tables
from .study import study

app = typer.Typer(
    name="oasis-hf",
    help="Sparse attention over a KV cache in host memory, for Hugging Face Transformers.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command()(models)
app.command()(bench)
app.command(name="eval")(evaluate)
app.command()(report)
app.command()(lookahead)
app.add_typer(study, name="study")
app.command()(tables)
app.command()(plots)


@app.callback()
def main() -> None:
    """Sparse attention over a KV cache in host memory, for Hugging Face Transformers."""


@app.command()
def version() -> None:
    """Print the versions that a bug report needs."""
    import platform
    from importlib.metadata import version as installed

    for package in ("oasis-hf", "transformers", "torch"):
        typer.echo(f"{package} {installed(package)}")
    typer.echo(f"python {platform.python_version()}")


@app.command()
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
    from .demo import DemoError, DemoOptions, run

    options = DemoOptions(
        model=model,
        document=document,
        question=question,
        context=context,
        budget=budget,
        index=index,
        on_miss=on_miss,
        max_new_tokens=max_new_tokens,
    )
    try:
        run(options)
    except DemoError as error:
        typer.secho(f"oasis-hf demo: {error}", fg="red", err=True)
        raise typer.Exit(1) from error
