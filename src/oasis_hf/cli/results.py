"""`oasis-hf tables` and `oasis-hf plots`: what the pages show of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .checks import output_folder
from .errors import Mistake
from .evaluate import require
from .terminal import working


def tables(
    names: Annotated[list[str] | None, typer.Argument(help="Of tables; all by default.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Put them into the pages.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Fail unless the pages have exactly these.")
    ] = False,
    results: Annotated[
        Path | None, typer.Option(help="A folder of results, or one table's file.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Another page than each table's own.")] = None,
) -> None:
    """Print the tables of docs/results from eval/results, write or check them."""
    require()
    from oasis_eval.tables.pages import RESULTS, ROOT, TABLES, differs, put, rendered

    if write and check:
        raise Mistake("--check: got it together with --write; leave one out")
    chosen = names or list(TABLES)
    for name in chosen:
        if name not in TABLES:
            raise Mistake(f"names: got {name!r}, expected some of {', '.join(TABLES)}")
    wrong = []
    try:
        for name in chosen:
            text = rendered(name, results or RESULTS)
            if not (write or check):
                typer.echo(text if len(chosen) == 1 else f"{name}\n\n{text}\n")
                continue
            own = page or ROOT / TABLES[name].page
            if write:
                put(name, text, own)
            elif differs(name, text, own):
                wrong.append(f"{own.name} differs from the results: oasis-hf tables {name} --write")
    except (OSError, ValueError) as error:
        raise Mistake(str(error)) from error
    for line in wrong:
        typer.echo(line)
    if wrong:
        raise typer.Exit(1)


def plots(
    results: Annotated[
        Path | None, typer.Option(help="A folder of results; eval/results by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the plots go; among the results by default.")
    ] = None,
    kind: Annotated[str, typer.Option(help="svg or png.")] = "svg",
) -> None:
    """Draw all plots of the pages and of the reports anew, from eval/results."""
    if kind not in ("svg", "png"):
        raise Mistake(f"--kind: got {kind!r}, expected svg or png")
    if out is not None:
        output_folder("--out", out)
    with working("drawing") as work:
        require("matplotlib")
        from oasis_eval.plots.everything import draw_all
        from oasis_eval.tables.pages import RESULTS

        try:
            for file in draw_all(results or RESULTS, out, kind):
                typer.echo(file)
                work.stage("drawing")
        except (OSError, ValueError) as error:
            raise Mistake(str(error)) from error
