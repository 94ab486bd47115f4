"""Real texts whose continuation is known: prose, source code, and answers to many needles."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

from ..needle import SOME, Needle, encode_question
from ..packaged import prose

SOURCES = ("argparse.py", "ast.py", "bdb.py", "calendar.py")
CITIES = ("Athens", "Berlin", "Cairo", "Dublin", "Lisbon", "Madrid", "Oslo", "Prague")
NEEDLES_QUESTION = "What are the special magic numbers mentioned in the provided text?"
TEXTS = ("prose", "code", "needles")


def text_ids(
    name: str, tokenizer: Any, context: int, following: int, seed: int = 0
) -> tuple[list[int], int]:
    """Ids of a text, `following` of them to be decoded at most; and how many are read before.

    Args:
        name: "prose", Python's language reference; "code", its standard library; "needles", eight
            numbers hidden in the prose, a question for all of them, and the right answer.
        tokenizer: the model's tokenizer.
        context: tokens to read; needles may take a few fewer.
        following: tokens of the continuation.
        seed: of the numbers.

    Raises:
        ValueError: the name is unknown, the text too short, or the needles do not fit.
    """
    if name == "needles":
        ids, context = _needles(tokenizer, context, seed)
    elif name in TEXTS:
        text = prose() if name == "prose" else _code()
        ids = tokenizer(text, verbose=False).input_ids
    else:
        raise ValueError(f"text: got {name!r}, expected one of {', '.join(TEXTS)}")
    if len(ids) < context + 2:
        raise ValueError(
            f"context: got {context}, expected fewer than the {len(ids)} tokens of the text "
            f"{name!r}, so that some follow; use {max(1, len(ids) - following)} or less"
        )
    return ids[: context + following], context


def _code() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join((folder / name).read_text(encoding="utf-8") for name in SOURCES)


def _needles(tokenizer: Any, context: int, seed: int) -> tuple[list[int], int]:
    """A chat with the needles in it, and its answer; the context ends where the answer begins."""
    draw = random.Random(seed)
    needles = [
        Needle(city, draw.randrange(10_000, 100_000), (place + 0.5) / len(CITIES))
        for place, city in enumerate(CITIES)
    ]
    ids = tokenizer(prose(), verbose=False).input_ids

    def asked(room: int) -> list[int]:
        text = tokenizer.decode(ids[:room]) if room else ""
        for needle in needles:
            text = needle.hide_in(text)
        return encode_question(tokenizer, text, NEEDLES_QUESTION)[0].tolist()

    room = context
    while room >= 1:
        chat = asked(room)
        if len(chat) <= context:
            break
        room -= len(chat) - context
    else:
        alone = len(asked(0))
        raise ValueError(
            f"context: got {context}, expected room for text beside the {len(needles)} needles and "
            f"the question, which take {alone} tokens alone; use at least "
            f"{max(context, alone) + SOME}"
        )
    if len(ids) < room:
        raise ValueError(
            f"context: got {context}, expected at most what the text 'needles' has, {len(chat)} "
            "tokens; use that or less"
        )
    answers = " ".join(x.sentence for x in draw.sample(needles, len(needles)))
    return chat + tokenizer(answers, add_special_tokens=False).input_ids, len(chat)
