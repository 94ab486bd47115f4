"""Reports in Markdown as a terminal shows them: no line is longer than it is wide."""

from __future__ import annotations

import textwrap
from itertools import groupby


def fitted(page: str, width: int) -> str:
    """The page with its paragraphs wrapped; tables that are too wide give a block for each row.

    Args:
        page: Markdown.
        width: columns of the terminal.
    """
    parts: list[str] = []
    for kind, lines in groupby(page.split("\n"), key=lambda line: line.startswith("|")):
        if kind:
            parts += _table(list(lines), width)
        else:
            parts += (wrapped for line in lines for wrapped in _wrapped(line, width))
    return "\n".join(parts)


def _wrapped(line: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        line,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    ) or [""]


def _table(lines: list[str], width: int) -> list[str]:
    """A table as it is if it fits; else each row's first cell, and its others below by name."""
    if max(map(len, lines)) <= width:
        return lines
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    if not rows:
        return []
    wide = min(max(len(name) for name in header[1:]), width // 2)
    found: list[str] = []
    for first, *others in rows:
        if found:
            found.append("")
        found += _wrapped(f"{header[0]} {first}".strip(), width)
        for name, value in zip(header[1:], others, strict=False):
            if not value:
                continue
            label = "\n".join(textwrap.wrap(name, wide)) or name
            *above, last = label.split("\n")
            found += [f"  {part}" for part in above]
            cells = textwrap.wrap(value, max(8, width - wide - 4)) or [""]
            found.append(f"  {last:<{wide}}  {cells[0]}")
            found += [f"  {'':<{wide}}  {cell}" for cell in cells[1:]]
    return found
