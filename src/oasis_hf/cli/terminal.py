"""What the commands print with: consoles without markup, and signs of life while they work.

Brackets in names and paths of users are text. So nothing here reads markup; the other modules of
the command line take their consoles and bars from this one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from oasis_hf_launch.pulse import Pulse

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


def console(stderr: bool = False) -> Console:
    """A console that takes all text as it is."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


class Work:
    """What a command is at: bars that move on a terminal; elsewhere lines, and dots after them.

    It goes to standard error, so that results can be redirected.

    Args:
        bars: the bars on a terminal, or None.
        pulse: what is written elsewhere.
    """

    def __init__(self, bars: Progress | None, pulse: Pulse) -> None:
        self.bars, self._pulse = bars, pulse
        self._task: TaskID | None = None
        self._keep = False

    def stage(self, what: str, total: float | None = None, keep: bool = False) -> None:
        """What is done from now on.

        Args:
            what: in a few words.
            total: how much of it there is, if that is known.
            keep: leave its bar standing after it.
        """
        self.end()
        if self.bars is None:
            self._pulse.say(what)
        else:
            self._task, self._keep = self.bars.add_task(what, total=total), keep

    def move(self, done: float, total: float | None = None, what: str | None = None) -> None:
        """How far the stage is, maybe of how much, and maybe what it is at."""
        if self.bars is not None and self._task is not None:
            self.bars.update(self._task, completed=done, total=total, description=what)

    def line(self, text: str) -> None:
        """A line that stays."""
        if self.bars is None:
            self._pulse.line(text)
        else:
            self.bars.console.print(text)

    def log(self, text: str) -> None:
        """A stage that leaves a line with its time."""
        said = f"{time.strftime('%H:%M:%S')} {text}"
        if self.bars is None:
            self._pulse.say(said)
        else:
            self.bars.console.print(said)
            self.stage(text)

    def end(self) -> None:
        """The stage is over."""
        if self.bars is not None and self._task is not None:
            if self._keep:
                self.bars.stop_task(self._task)
            else:
                self.bars.remove_task(self._task)
        self._task = None


@contextmanager
def working(what: str, remaining: bool = False) -> Iterator[Work]:
    """Show that a command is at work: something at least every three seconds.

    Args:
        what: the first stage.
        remaining: show an estimate of the time left.
    """
    shown = console(stderr=True)
    if not shown.is_terminal:
        with Pulse() as pulse:
            pulse.say(what, after=1.0)
            yield Work(None, pulse)
        return
    with _bars(shown, remaining) as bars:
        work = Work(bars, Pulse(quiet=True))
        work.stage(what)
        try:
            yield work
        finally:
            work.end()


def _bars(shown: Console, remaining: bool) -> Progress:
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    class Counted(ProgressColumn):
        """How many of how many, where that is known."""

        def render(self, task: Any) -> Any:
            from rich.text import Text

            return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")

    told = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    left = [TextColumn("left", markup=False), TimeRemainingColumn()] if remaining else []
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=told),
        BarColumn(bar_width=16),
        Counted(),
        TimeElapsedColumn(),
        *left,
        console=shown,
        expand=True,
        # Results are written between bars; where they go to a file, they must not come here.
        redirect_stdout=sys.stdout.isatty(),
        # Stages differ in length: the mean of a long while tells more than the last minute.
        speed_estimate_period=600,
    )
