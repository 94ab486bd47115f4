"""What users are told when a command cannot do what they ask: one line, and no traceback.

Exit codes: 2 for an option that cannot be used, as for those that typer refuses itself; 1 for what
the machine lacks (a package, a connection, memory), and for a result that is bad.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

USAGE, FAILED = 2, 1


class Mistake(Exception):
    """An option that cannot be used; the message names it, what was got, and the way out."""

    code = USAGE


class Failure(Mistake):
    """What no option can put right; the message says what does."""

    code = FAILED


def mistake(option: str, got: object, expected: str) -> Mistake:
    """The error for an option, its value, and what it should be (with what to do)."""
    return Mistake(f"{option}: got {_shown(got)}, expected {expected}")


def option_of(error: Exception, options: dict[str, str]) -> Mistake:
    """An error of the library, which begins with the name of an argument, by that of its option.

    Args:
        error: such as "budget: got 7, expected ...".
        options: from arguments to options, such as {"budget": "--budgets"}.
    """
    name, colon, rest = str(error).partition(":")
    return Mistake(f"{options[name]}:{rest}" if colon and name in options else str(error))


def _shown(value: object) -> str:
    text = str(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Commands(TyperGroup):
    """Runs a command, and turns what users can put right into one line."""

    def invoke(self, ctx: Any) -> Any:
        """As in `TyperGroup`."""
        from ..config import OasisConfigError
        from ..facts.handle import OasisUnsupportedError
        from ..storage import HostMemoryError

        refusals = (Mistake, OasisConfigError, OasisUnsupportedError, HostMemoryError)
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, refusals):
                said, code = str(error), error.code if isinstance(error, Mistake) else FAILED
            elif type(error).__name__ == "OutOfMemoryError":
                said, code = _first_line(error), FAILED
                said += "; use a shorter context or a smaller batch"
            else:
                raise
            typer.secho(f"{_called(ctx)}: {' '.join(said.split())}", fg="red", err=True)
            raise typer.Exit(code) from error


def _called(ctx: Any) -> str:
    """The command as users type it, that of a group of commands too."""
    names = [ctx.invoked_subcommand] if ctx.invoked_subcommand else []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name)
        ctx = ctx.parent
    return " ".join(["oasis-hf", *names])


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
