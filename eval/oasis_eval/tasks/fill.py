"""Fills a draft so that prompt and answers take the wanted number of the model's own tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .parts import Draft
from .prompt import follow_up, opening, plain

LEAD = 12
"""Units given up for words of prose where these can make the length exact."""
SHIFTS = 24
"""Places of the prose from which the lead may start."""
GUESSES = 12
"""Steps of a search before it halves what is left."""


def fill(
    tokenizer: Any, draft: Draft, context: int, prose: Callable[[int], str]
) -> tuple[str, int]:
    """The longest text with which prompt and answers stay within `context` tokens.

    Units of the draft come first; what is left is filled with words of prose before the text, so
    that nearly all prompts of a task are of one length and can be read together.

    Returns:
        The text, and the tokens of the first prompt.

    Raises:
        ValueError: the smallest text is longer already.
    """
    tokens = _counter(tokenizer, draft)
    room = context - reserved(tokenizer, draft)
    check(tokenizer, draft, context)
    # Hardly a unit takes less than one token; a list that ends sooner is followed by prose alone.
    units = _most(lambda n: tokens(draft.body(n)), room, draft.fewest, 2 * context)
    body = draft.body(units)
    found = body, tokens(body)
    for given_up in (0, LEAD):
        if found[1] < room and units - given_up >= draft.fewest:
            body = draft.body(units - given_up)
            found = max(found, _led(tokens, room, body, prose), key=lambda pair: pair[1])
    return found


def check(tokenizer: Any, draft: Draft, context: int) -> None:
    """That the smallest text of a draft fits.

    Raises:
        ValueError: it does not.
    """
    needed = _counter(tokenizer, draft)(draft.body(draft.fewest)) + reserved(tokenizer, draft)
    if needed > context:
        raise ValueError(
            f"context: got {context}, which is too short for this task; use at least {needed}"
        )


def _counter(tokenizer: Any, draft: Draft) -> Callable[[str], int]:
    """Tokens of the first prompt with a text, or of the text where nothing is asked."""
    first = draft.turns[0] if draft.turns else None

    def tokens(text: str) -> int:
        if first is None:
            return len(plain(tokenizer, text))
        return len(opening(tokenizer, text, first.question, first.lead_in))

    return tokens


def _led(
    tokens: Callable[[str], int], room: int, body: str, prose: Callable[[int], str]
) -> tuple[str, int]:
    """The body behind some words of prose, as near to `room` tokens as several starts allow."""
    best = body, tokens(body)
    most = room - best[1]
    for shift in range(SHIFTS):

        def text(words: int, shift: int = shift) -> str:
            return _join(" ".join(prose(shift + words).split(" ")[shift:]) if words else "", body)

        words = _most(lambda n: tokens(text(n)), room, 0, most + 1)
        best = max(best, (text(words), tokens(text(words))), key=lambda pair: pair[1])
        if best[1] == room:
            break
    return best


def reserved(tokenizer: Any, draft: Draft) -> int:
    """Tokens of the answers and of all questions but the first."""
    if not draft.turns:
        return 0
    asked = (follow_up(tokenizer, turn.question, turn.lead_in) for turn in draft.turns[1:])
    return len(draft.turns) * draft.answer_tokens + sum(map(len, asked))


def _join(lead: str, body: str) -> str:
    return f"{lead}\n\n{body}" if lead and body else lead or body


def _most(tokens: Callable[[int], int], room: int, least: int, most: int) -> int:
    """The largest number below `most` that takes at most `room` tokens, given that `least` does.

    Texts are long and tokenizing takes time: each step guesses from the tokens per unit so far.
    """
    low, high, at_low, rate = least, most, tokens(least), 1.3
    for step in range(2 * most.bit_length() + GUESSES):
        if high - low < 2:
            break
        guess = low + max(1, int((room - at_low) / rate))
        middle = min(guess if step < GUESSES else (low + high) // 2, high - 1)
        found = tokens(middle)
        rate = max((found - at_low) / (middle - low), 0.01)
        if found <= room:
            low, at_low = middle, found
        else:
            high = middle
    return low
