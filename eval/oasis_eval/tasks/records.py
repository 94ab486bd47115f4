"""Many records at once: as JSON, copied, and sorted. Near-lossless methods have failed on these."""

from __future__ import annotations

import json
from collections.abc import Callable

from ..material.words import CITIES, NOUNS, keys, names, numbers
from .hiding import hidden, some_depths
from .parts import Draft, Scene, Turn

TOKENS = 56
"""About what one record takes in an answer, as JSON."""
LINE_TOKENS = 24
"""About what one record takes as a line."""


def extraction(scene: Scene) -> Draft:
    """Three to twenty orders in prose, to be returned as JSON; scored field by field."""
    count = _count(scene, TOKENS, 3)
    orders = [
        {"order": int(order), "name": name, "city": city, "item": item, "quantity": quantity}
        for order, name, city, item, quantity in zip(
            numbers(scene.draw, count, digits=5),
            names(scene.draw, count),
            scene.draw.sample(CITIES, count),
            scene.draw.sample(NOUNS, count),
            scene.draw.sample(range(2, 99), count),
            strict=True,
        )
    ]
    sentences = [
        "Order {order}: {name} of {city} bought the article {item}, quantity {quantity}.".format(
            **order
        )
        for order in orders
    ]
    turn = Turn(
        f"The text mentions {count} orders. Return all of them, in the order of the text, as a "
        'JSON list of objects with the keys "order", "name", "city", "item" and "quantity".',
        tuple(json.dumps(order) for order in orders),
        "```json\n[\n",
    )
    depths = some_depths(scene.draw, count)
    return Draft(hidden(scene.prose, sentences, depths), (turn,), TOKENS * count, depths)


def copy(scene: Scene) -> Draft:
    """Records spread over prose, to be repeated in the order of the text."""
    lines, depths, body = _lines(scene)
    return Draft(body, (_ask(lines, "in the order of the text"),), LINE_TOKENS * len(lines), depths)


def sort(scene: Scene) -> Draft:
    """The same records, to be sorted by their numbers."""
    lines, depths, body = _lines(scene)
    ranked = sorted(lines, key=lambda line: int(line.rsplit(" ", 1)[1]))
    turn = _ask(ranked, "sorted by their numbers, the smallest first")
    return Draft(body, (turn,), LINE_TOKENS * len(lines), depths)


def _lines(scene: Scene) -> tuple[list[str], tuple[float, ...], Callable[[int], str]]:
    count = _count(scene, LINE_TOKENS, 6)
    pairs = zip(keys(scene.draw, count), numbers(scene.draw, count, digits=4), strict=True)
    lines = [f"Record {key}: {number}" for key, number in pairs]
    depths = some_depths(scene.draw, count)
    return lines, depths, hidden(scene.prose, [f"{line}." for line in lines], depths)


def _ask(lines: list[str], order: str) -> Turn:
    return Turn(
        f"The text holds {len(lines)} records of the form 'Record name: number'. List all of them, "
        f"{order}, one on each line.",
        tuple(lines),
    )


def _count(scene: Scene, tokens: int, least: int) -> int:
    """Records of which an answer takes at most a third of the context; at most twenty."""
    return scene.draw.randint(least, max(least, min(20, scene.context // (3 * tokens))))
