"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """A table; every column after the first `left` ones is aligned right."""
    header = list(header)
    rule = ["---" if place < left else "--:" for place in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])
