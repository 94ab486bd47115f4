"""Says that a process is alive: a line for what it does, and a dot every few seconds after it."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

SECONDS = 2.5
"""Between two signs of life."""


class Pulse:
    """Writes to standard error from a thread, while the block runs.

    Args:
        quiet: write nothing.
        seconds: between two dots.
        file: where to write, instead of what is `sys.stderr` then.
    """

    def __init__(
        self, quiet: bool = False, seconds: float = SECONDS, file: TextIO | None = None
    ) -> None:
        self.quiet, self.seconds, self.file = quiet, seconds, file
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._pending, self._due = "", time.monotonic()
        self._open = False

    def __enter__(self) -> Pulse:
        if not self.quiet:
            self._thread = threading.Thread(target=self._beat, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._close()

    def say(self, text: str, after: float = 0.0) -> None:
        """A line about what is done from now on; left out if that ends within `after` seconds."""
        with self._lock:
            self._close()
            self._pending, self._due = text, time.monotonic() + after
            if not after:
                self._mark()

    def line(self, text: str) -> None:
        """A whole line of results; dots after it stand for what was said last."""
        with self._lock:
            self._close()
            self._write(f"{text}\n")
            self._due = time.monotonic() + self.seconds

    def _beat(self) -> None:
        while not self._ended.wait(0.1):
            with self._lock:
                if time.monotonic() >= self._due:
                    self._mark()

    def _mark(self) -> None:
        """What goes on if it has not been said, else a dot."""
        self._write(self._pending or ".")
        self._pending, self._open = "", True
        self._due = time.monotonic() + self.seconds

    def _close(self) -> None:
        """End a line of dots."""
        if self._open:
            self._write("\n")
        self._pending, self._open = "", False

    def _write(self, text: str) -> None:
        if self.quiet:
            return
        file = self.file or sys.stderr
        file.write(text)
        file.flush()
