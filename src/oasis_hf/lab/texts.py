"""Real texts whose continuation is known: prose, source code, and answers to many needles."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

from ..needle import Needle, encode_question
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
        ValueError: the name is unknown, or the text too short.
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
            f"text: {name!r} has {len(ids)} tokens, expected more than the context of {context}"
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
    room = context
    while True:
        text = tokenizer.decode(ids[:room])
        for needle in needles:
            text = needle.hide_in(text)
        chat = encode_question(tokenizer, text, NEEDLES_QUESTION)[0].tolist()
        if len(chat) <= context:
            break
        room -= len(chat) - context
    answers = " ".join(x.sentence for x in draw.sample(needles, len(needles)))
    return chat + tokenizer(answers, add_special_tokens=False).input_ids, len(chat)
