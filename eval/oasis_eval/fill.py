"""Fills a draft so that prompt and answers take the wanted number of the model's own tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .prompt import follow_up, opening, plain
from .sample import Draft


def fill(
    tokenizer: Any, draft: Draft, context: int, prose: Callable[[int], str]
) -> tuple[str, int]:
    """The longest text with which prompt and answers stay within `context` tokens.

    Units of the draft come first; what is left of less than one unit is filled with words of prose
    before the text.

    Returns:
        The text, and the tokens of the first prompt.

    Raises:
        ValueError: the smallest text is longer already.
    """
    first = draft.turns[0] if draft.turns else None

    def tokens(text: str) -> int:
        if first is None:
            return len(plain(tokenizer, text))
        return len(opening(tokenizer, text, first.question, first.lead_in))

    reserve = reserved(tokenizer, draft)
    room = context - reserve
    least = tokens(draft.body(draft.fewest))
    if least > room:
        raise ValueError(
            f"context: got {context}, which is too short for this task; use at least "
            f"{least + reserve}"
        )
    # Hardly a unit takes less than one token; a list that ends sooner is followed by prose alone.
    units = _most(lambda n: tokens(draft.body(n)) <= room, draft.fewest, 2 * context)
    body = draft.body(units)
    words = _most(lambda n: tokens(_join(prose(n), body)) <= room, 0, 2 * context)
    text = _join(prose(words), body)
    return text, tokens(text)


def reserved(tokenizer: Any, draft: Draft) -> int:
    """Tokens of the answers and of all questions but the first."""
    if not draft.turns:
        return 0
    asked = (follow_up(tokenizer, turn.question, turn.lead_in) for turn in draft.turns[1:])
    return len(draft.turns) * draft.answer_tokens + sum(map(len, asked))


def _join(lead: str, body: str) -> str:
    return f"{lead}\n\n{body}" if lead and body else lead or body


def _most(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number below `most` that fits, given that `least` and all below it do."""
    step = 1
    while least + step < most and fits(least + step):
        step *= 2
    low, high = least + step // 2, least + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
