"""What indexes, caches and cases are called in tables and plots."""

from __future__ import annotations

from typing import Any

from oasis_hf.config import DEFAULT_CAP

LABELS = {
    "keys2bit": "2-bit keys (`keys2bit`)",
    "minmax": "min/max of a block (`minmax`)",
    "oracle": "true attention (`oracle`)",
    "mean": "mean key (`mean`)",
    "streaming": "none: newest blocks (`streaming`)",
}
"""Indexes for people, in the order of tables and legends."""
CACHES = {
    "dense": "DynamicCache",
    "static": "StaticCache, CUDA graph",
    "offloaded": "DynamicCache, offloaded",
}
"""Transformers' caches by their arm of the bench."""
MISSES = {"fetch": "fetched", "skip": "skipped"}


def index_label(index: str) -> str:
    """An index for people; one of a user's own by its name."""
    return LABELS.get(index, f"`{index}`")


def index_order(index: str) -> tuple[int, str]:
    """Sorts indexes as `LABELS` has them, others after these by name."""
    order = list(LABELS)
    return (order.index(index) if index in order else len(order)), index


def miss_label(on_miss: str) -> str:
    """What is done about a missing block."""
    return MISSES.get(on_miss, f"fetched above a share of {on_miss}")


def size_label(batch: int, tokens: int) -> str:
    """A case of the bench: sequences, and tokens of context of each."""
    return f"B{batch}, {round(tokens / 1024)}K"


def cache_name(row: dict[str, Any], budget: int) -> str:
    """What decodes in a row of the bench; an Oasis budget is named where it is not `budget`."""
    if row["arm"] != "oasis":
        return CACHES[row["arm"]]
    options = row["options"]
    words = ["oasis", f"`{options['index']}`", str(options["on_miss"])]
    if options["budget"] != budget:
        words.append(f"budget {options['budget']:,}")
    if cap_of(row) != DEFAULT_CAP:
        words.append(f"cap {cap_name(cap_of(row))}")
    if options.get("compile"):
        words.append("compiled")
    if row.get("drafts"):
        words.append(f"{row['drafts']} drafts accepted at {row['acceptance']}")
    return ", ".join(words)


def cap_of(row: dict[str, Any]) -> str | float | None:
    """The `fetch_cap` of an Oasis row; older results do not name the only one there was."""
    cap: str | float | None = row["options"].get("fetch_cap", DEFAULT_CAP)
    return cap


def cap_name(cap: str | float | None) -> str:
    return "none" if cap is None else str(cap) if isinstance(cap, str) else f"{cap:g}"


def tools(about: dict[str, Any], *names: str) -> list[str]:
    """Versions that a result was made with: "torch 2.11.0".

    Older results have them next to the rest, newer ones under "versions".
    """
    found = about.get("versions", about)
    said = {"torch": "torch", "triton": "triton", "transformers": "Transformers"}
    return [f"{said[name]} {found[name]}" for name in names]
