"""Facts in the words of the small retrieval model, alone in noise or among many others."""

from __future__ import annotations

from ..retrieval.language import CELL, LENGTH, Words, fact, question
from .hiding import one_depth
from .parts import Draft, Scene, Turn

SHARE = 12
"""Tokens of the context for each of many facts: half of it is facts."""


def recall(scene: Scene, many: bool = False, words: Words | None = None) -> Draft:
    """One key is asked for; its four values are the answer.

    Args:
        scene: what to draw from; its prose is not used.
        many: hide as many facts as there are keys, or as take half of the context.
        words: the vocabulary; that of the trained model by default.
    """
    words = words or Words()
    _, _, *listed = words.list()
    keys, values = listed[: words.keys], listed[words.keys : words.keys + words.values]
    count = max(1, min(words.keys, scene.context // SHARE)) if many else 1
    facts = [(key, scene.draw.choices(values, k=LENGTH)) for key in scene.draw.sample(keys, count)]
    # The first fact is asked for; the depths of the others are drawn.
    depth = one_depth(scene.draw, scene.number)
    depths = [depth, *(scene.draw.random() for _ in facts[1:])]
    noise = scene.draw.choices(listed[words.keys + words.values :], k=scene.context)
    hidden = sorted(zip(depths, (fact(*one) for one in facts), strict=True))

    def body(units: int) -> str:
        parts, before = [], 0
        for place, text in hidden:
            # As in training, some noise stands before the first fact.
            cut = max(CELL, round(place * min(units, len(noise))))
            parts += [*noise[before:cut], text]
            before = cut
        return " ".join([*parts, *noise[before:units]])

    key, found = facts[0]
    turn = Turn(question(key), (" ".join(found),))
    return Draft(body, (turn,), 2 * LENGTH, (depth,))
