"""Needles in a haystack: RULER's eight, eleven at once, and one conversation about four."""

from __future__ import annotations

from ..material.words import keys, numbers, uuids
from .hiding import filler, hidden, one_depth, some_depths
from .parts import Draft, Scene, Turn

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
VALUE_TOKENS = 24
"""About what one of many values takes in an answer that repeats its key."""
ONE = "What is the special magic {kind} for {keys} mentioned in the provided text?"
ALL = "What are all the special magic {kind}s for {keys} mentioned in the provided text?"
# The space at the end belongs to it: without, the first token decides between a number, a quote
# and "the", a near tie on small models that says nothing about retrieval.
ONE_LEAD = "The special magic {kind} for {keys} mentioned in the provided text is "
ALL_LEAD = "The special magic {kind}s for {keys} mentioned in the provided text are "


def niah(
    scene: Scene,
    haystack: str = "prose",
    count: int = 1,
    values: int = 1,
    queries: int = 1,
    kind: str = "number",
) -> Draft:
    """Needles in filler or prose.

    Args:
        scene: what to draw from.
        haystack: "filler", sentences that repeat, or "prose".
        count: keys in the text.
        values: values of each key.
        queries: keys asked for.
        kind: of the values, "number" of seven digits or "uuid".
    """
    names = keys(scene.draw, count)
    found = _values(scene, kind, count * values)
    facts = [(name, found.pop()) for name in names for _ in range(values)]
    asked = names[:queries]
    turn = ask(asked, [value for name, value in facts if name in asked], kind)
    single = len(facts) == 1
    depths = (
        (one_depth(scene.draw, scene.number),) if single else some_depths(scene.draw, len(facts))
    )
    scene.draw.shuffle(facts)
    body = hidden(
        filler if haystack == "filler" else scene.prose, [say(*f, kind) for f in facts], depths
    )
    return Draft(body, (turn,), max(128, VALUE_TOKENS * len(turn.references)), depths)


def niah_needles(scene: Scene, kind: str = "number") -> Draft:
    """A haystack that is itself needles: keys of words with numbers, or identifiers with others."""
    most = max(16, scene.context // 8)
    named = kind == "uuid"
    names = uuids(scene.draw, most) if named else keys(scene.draw, min(most, 20_000))
    facts = list(zip(names, _values(scene, kind, len(names)), strict=True))
    depth = one_depth(scene.draw, scene.number)
    (name, value), others = facts[0], facts[1:]

    def body(units: int) -> str:
        lines = [say(*fact, kind) for fact in others[:units]]
        lines.insert(round(depth * len(lines)), say(name, value, kind))
        return "\n".join(lines)

    return Draft(body, (ask([name], [value], kind),), 128, (depth,))


def ask_again(scene: Scene, count: int = 4) -> Draft:
    """Four needles, asked one after the other in one conversation; the first once more at last."""
    names, values = keys(scene.draw, count), numbers(scene.draw, count)
    turns = [ask([name], [value], "number") for name, value in zip(names, values, strict=True)]
    facts = [say(name, value, "number") for name, value in zip(names, values, strict=True)]
    scene.draw.shuffle(facts)
    depths = some_depths(scene.draw, count)
    return Draft(hidden(scene.prose, facts, depths), (*turns, turns[0]), 16, depths)


def say(key: str, value: str, kind: str) -> str:
    """One needle."""
    return NEEDLE.format(kind=kind, key=key, value=value)


def ask(asked: list[str], references: list[str], kind: str) -> Turn:
    """The question for some keys; it says whether one value is expected or several."""
    listed = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + f" and {asked[-1]}"
    question, lead = (ONE, ONE_LEAD) if len(references) == 1 else (ALL, ALL_LEAD)
    return Turn(
        question.format(kind=kind, keys=listed),
        tuple(references),
        lead.format(kind=kind, keys=listed),
    )


def _values(scene: Scene, kind: str, count: int) -> list[str]:
    return (uuids if kind == "uuid" else numbers)(scene.draw, count)
