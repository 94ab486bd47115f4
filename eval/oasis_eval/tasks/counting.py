"""RULER's aggregation: the most common words of a list, and of a made-up text."""

from __future__ import annotations

import math
import re
from random import Random

from ..material.words import keys, made_up
from .parts import Draft, Scene, Turn

COMMON = 10
SHORT = 4096
"""Contexts below this repeat words less often and have a shorter example, as in RULER."""
ALPHA = 2.0
ZETA = math.pi**2 / 6
"""The Riemann zeta function at `ALPHA`."""
NOISE = "..."


def common_words(scene: Scene) -> Draft:
    """A numbered list of words: ten are common, the rest rare; a worked example comes first."""
    often, rarely = (6, 1) if scene.context < SHORT else (30, 3)
    # The example has 20 words in all, or 40.
    example_often, example_rarely, example_rest = (
        (3, 1, 10) if scene.context < SHORT else (10, 3, 30)
    )
    words = vocabulary(scene, 2 * COMMON + example_rest + scene.context // 4)
    shown, common = words[:COMMON], words[COMMON : 2 * COMMON]
    shown_rest = words[2 * COMMON : 2 * COMMON + example_rest]
    rest = words[2 * COMMON + example_rest :]
    seed = scene.draw.random()
    question = f"What are the {COMMON} most common words in the list above?"
    example = (
        f"{numbered(seed, shown, example_often, shown_rest, example_rarely)}\n{question}\n"
        f"The {COMMON} most common words are: {listed(shown)}\n\n"
    )
    turn = Turn(question, tuple(common), f"The {COMMON} most common words are: ")
    head = "Each list below has words that are more common than the others.\n"

    def body(units: int) -> str:
        return head + example + numbered(seed, common, often, rest[:units], rarely)

    return Draft(body, (turn,), 120, fewest=1)


def frequent_words(scene: Scene) -> Draft:
    """Made-up words, the k-th with a share of k**-2 / zeta(2); the first of them is noise."""
    words = made_up(scene.draw, max(40, scene.context // 50), 6)
    seed = scene.draw.random()
    turn = Turn(
        "Ignore the dots. What are the three words that appear most often in the coded text above?",
        tuple(words[:3]),
        "The three words that appear most often are: ",
    )

    def body(units: int) -> str:
        ranked = [NOISE, *words]
        text = [
            word
            for rank, word in enumerate(ranked, 1)
            for _ in range(int(units * rank**-ALPHA / ZETA))
        ]
        Random(seed).shuffle(text)
        return "This is a coded text: " + " ".join(text)

    # From here on the third and the fourth word differ by several appearances.
    return Draft(body, (turn,), 50, fewest=200)


def numbered(seed: float, common: list[str], often: int, rest: list[str], rarely: int) -> str:
    """Words with their numbers of repeats, shuffled and numbered."""
    words = common * often + rest * rarely
    Random(seed).shuffle(words)
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def listed(words: list[str]) -> str:
    """Words as an answer lists them."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def vocabulary(scene: Scene, count: int) -> list[str]:
    """Distinct words of the prose in random order; pairs of words where it has too few.

    No word is part of another, as the metric looks for parts of the answer.
    """
    found = sorted(set(re.findall(r"\b[a-z]{5,10}\b", scene.prose(max(4 * count, 4000)))))
    scene.draw.shuffle(found)
    chosen = [word for word in found[:400] if sum(word in other for other in found[:400]) == 1]
    known = set(chosen)
    chosen += [word for word in found[400:] if word not in known]
    if len(chosen) < count:
        chosen += keys(scene.draw, count - len(chosen))
    return chosen[:count]
