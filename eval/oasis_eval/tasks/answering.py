"""Questions among distracting documents: RULER's two, with constructed facts in real prose."""

from __future__ import annotations

from ..material.words import keys, names
from .parts import Draft, Scene, Turn

DOCUMENT_WORDS = 60
INSTRUCTION = "Answer with the name only."


def one_hop(scene: Scene) -> Draft:
    """Every document says who founded something; one founder is asked for."""
    societies = keys(scene.draw, _most(scene))
    founders = names(scene.draw, min(len(societies), 600))
    facts = [
        f"The {society} society was founded by {founders[n % len(founders)]}."
        for n, society in enumerate(societies)
    ]
    turn = Turn(
        f"Who founded the {societies[0]} society? {INSTRUCTION}",
        (founders[0],),
        f"The {societies[0]} society was founded by ",
    )
    return _draft(scene, facts[:1], facts[1:], turn)


def two_hop(scene: Scene) -> Draft:
    """Which college a society meets in is in one document, who founded the college in another."""
    names_ = keys(scene.draw, 2 * _most(scene))
    societies, colleges = names_[::2], names_[1::2]
    founders = names(scene.draw, min(len(colleges), 600))
    meets = [
        f"The {society} society meets every year in the hall of {college} college."
        for society, college in zip(societies, colleges, strict=True)
    ]
    founds = [
        f"{college.capitalize()} college was founded by {founders[n % len(founders)]}."
        for n, college in enumerate(colleges)
    ]
    turn = Turn(
        f"Who founded the college in whose hall the {societies[0]} society meets every year? "
        f"{INSTRUCTION}",
        (founders[0],),
        f"The {societies[0]} society meets in a college that was founded by ",
    )
    distracting = [fact for pair in zip(meets[1:], founds[1:], strict=True) for fact in pair]
    return _draft(scene, [meets[0], founds[0]], distracting, turn)


def _most(scene: Scene) -> int:
    """More documents than any text of this length can hold, though not more than there are keys."""
    return min(max(8, scene.context // DOCUMENT_WORDS), 9000)


def _draft(scene: Scene, facts: list[str], distracting: list[str], turn: Turn) -> Draft:
    places = [scene.draw.random() for _ in facts]

    def body(units: int) -> str:
        said = distracting[:units]
        for fact, place in zip(facts, places, strict=True):
            said.insert(round(place * len(said)), fact)
        words = scene.prose(DOCUMENT_WORDS * len(said)).split(" ")
        documents = (
            f"Document {number}:\n{fact} "
            + " ".join(words[DOCUMENT_WORDS * (number - 1) : DOCUMENT_WORDS * number])
            for number, fact in enumerate(said, 1)
        )
        return "\n\n".join(documents)

    return Draft(body, (turn,), 32, tuple(places))
