"""How much of the background fetches shows in the time of a step."""

from __future__ import annotations

from typing import Any

MOVED = ("fetch_cap", "on_miss")
"""Options that decide what is fetched, and when."""


def compare(rows: list[dict[str, Any]]) -> None:
    """Set each Oasis row beside the one of its size that fetches nothing, where there is one.

    A step can end no sooner than its own work, nor than its transfers. Adds to the rows:

    - `exposed_ms`: what the step takes beyond the step that fetches nothing;
    - `overlap`: the step over the longer of that step and its own `link_ms`. 1 is perfect.

    May be called again as rows come in.
    """
    rows = [row for row in rows if "link_ms" in row]
    alone = {_alike(row): row["ms_p50"] for row in rows if fetches_nothing(row["options"])}
    for row in rows:
        without = alone.get(_alike(row))
        if without is not None:
            row["exposed_ms"] = row["ms_p50"] - without
            row["overlap"] = row["ms_p50"] / max(without, row["link_ms"])


def fetches_nothing(options: dict[str, Any]) -> bool:
    """Whether a cache of these options moves nothing between steps."""
    return options["on_miss"] == "skip" and options["fetch_cap"] == 0


def _alike(row: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for rows that differ only in what they fetch."""
    options = {name: value for name, value in row["options"].items() if name not in MOVED}
    drafts = (row["drafts"], row["acceptance"])
    return row["batch"], row["tokens"], *drafts, *sorted(options.items())
