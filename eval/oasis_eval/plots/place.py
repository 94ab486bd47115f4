"""Words next to points, where they cover as little as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

OFFSETS = (
    *((0, 6), (0, -12), (7, -3), (-7, -3), (6, 5), (-6, 5), (6, -11), (-6, -11)),
    *((0, 14), (0, -20), (14, 8), (-14, 8), (14, -14), (-14, -14)),
)
"""Of a word from its point, in points; the first are the nicest."""
LETTER, HEIGHT, RADIUS = 3.6, 7.0, 3.5
"""Sizes of the words and of the points, in points."""
STEPS = 40
"""Boxes that stand for a piece of a line."""
Box = tuple[float, float, float, float]


def name_points(
    figure: Figure, points: Sequence[tuple[Axes, float, float, str, str]], size: float = 6
) -> None:
    """Writes a word at each point: panel, x, y, word and colour. Limits must be set before."""
    figure.draw_without_rendering()
    scale = 72 / figure.dpi
    marks: dict[Axes, list[Box]] = {}
    for axes, x, y, _, _ in points:
        left, bottom = axes.transData.transform((x, y)) * scale
        box = (left - RADIUS, bottom - RADIUS, left + RADIUS, bottom + RADIUS)
        marks.setdefault(axes, []).append(box)
    taken = {axes: boxes + _lines(axes, scale) for axes, boxes in marks.items()}
    for axes, x, y, word, colour in points:
        left, bottom = axes.transData.transform((x, y)) * scale
        boxes = [_box(left + dx, bottom + dy, dx, word) for dx, dy in OFFSETS]
        covered = [sum(_shared(box, other) for other in taken[axes]) for box in boxes]
        best = covered.index(min(covered))
        taken[axes].append(boxes[best])
        dx, dy = OFFSETS[best]
        text = axes.annotate(
            word,
            (x, y),
            (dx, dy),
            textcoords="offset points",
            fontsize=size,
            color=colour,
            ha="center" if not dx else "left" if dx > 0 else "right",
            annotation_clip=False,
            bbox={"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.2},
        )
        text.set_in_layout(False)


def _lines(axes: Axes, scale: float) -> list[Box]:
    """Small boxes along the lines of a panel."""
    found = []
    for line in axes.lines:
        if line.get_linestyle() in ("None", "none"):
            continue
        corners = axes.transData.transform(line.get_xydata()) * scale
        for one, other in pairwise(corners):
            for step in range(STEPS + 1):
                x, y = one + (other - one) * step / STEPS
                found.append((x - 1, y - 1, x + 1, y + 1))
    return found


def _box(x: float, y: float, dx: float, word: str) -> Box:
    """Where a word stands: left, bottom, right, top."""
    width = LETTER * len(word)
    left = x - width / 2 if not dx else x if dx > 0 else x - width
    return left, y, left + width, y + HEIGHT


def _shared(one: Box, other: Box) -> float:
    """Area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)
