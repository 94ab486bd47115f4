"""What the titles of a run's plots say: which model answered what."""

from __future__ import annotations

import re
from typing import Any

from ..arms import DENSE, named
from ..labels import index_order
from ..records import OVERALL, Cells


def arm_order(name: str) -> tuple[Any, ...]:
    """Sorts arms: dense, then by index, options and budget; misses that are fetched come first."""
    arm = named(name)
    policy = name.split("/")[1:2]
    place = index_order(name.split("/")[0])
    # Numbers by their size: layers [5] come before [10].
    family = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", arm.family)]
    return name != DENSE.name, place, policy != ["fetch"], family, arm.budget


def subject(about: dict[str, Any]) -> str:
    """The model and its type."""
    return f"{about['model']}, {about['dtype']}"


def tasks_of(cells: Cells, about: dict[str, Any]) -> str:
    """The tasks of some records or cells, with what was drawn for them."""
    tasks = dict.fromkeys(cell["task"] for cell in cells if cell["task"] != OVERALL)
    mean = "mean over tasks " if len(tasks) > 1 else "task "
    samples = about.get("config", {}).get("samples")
    drawn = f", {samples} samples each" if samples else ""
    return f"{mean}{', '.join(tasks)}{drawn}; text '{about.get('text', '')}'"
