"""Needle prompts: one fact hidden in a long text, and the question that only it answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

NEEDLE = "One of the special magic numbers for {city} is: {number}."
SOME = 16
"""Tokens of text that are asked for where there is no room for any."""
QUESTION = "What is the special magic number for {city} mentioned in the provided text?"


@dataclass(frozen=True)
class Needle:
    """One hidden fact.

    Attributes:
        city: What the fact is about.
        number: What has to be answered, five digits in the prompts that are known to work.
        depth: Where the fact is: 0 is the start of the text, 1 its end.
    """

    city: str = "Vienna"
    number: int = 48153
    depth: float = 0.35

    def __post_init__(self) -> None:
        if not 0.0 <= self.depth <= 1.0:
            raise ValueError(f"depth: got {self.depth}, expected 0 (start of the text) to 1 (end)")

    @property
    def sentence(self) -> str:
        """The sentence that is put into the text."""
        return NEEDLE.format(city=self.city, number=self.number)

    @property
    def question(self) -> str:
        """The question that asks for the number."""
        return QUESTION.format(city=self.city)

    @property
    def answer(self) -> str:
        """The text that a right answer contains."""
        return str(self.number)

    def hide_in(self, text: str) -> str:
        """Returns `text` with the sentence inserted before the sentence next to `depth`."""
        wanted = self.depth * len(text)
        starts = [0, *(match.end() for match in re.finditer(r"[.!?]\s+", text)), len(text)]
        cut = min(starts, key=lambda start: abs(start - wanted))
        head, tail = text[:cut], text[cut:]
        before = "" if not head or head[-1].isspace() else " "
        return f"{head}{before}{self.sentence} {tail}".rstrip()


def needle_prompt(
    tokenizer: Any, context_tokens: int, depth: float, city: str, number: int, text: str
) -> Any:
    """Builds the token ids of a needle prompt of a given length.

    The message is the text with the needle in it, an empty line, and the question, in the model's
    chat template; without a template it is the plain message.

    Args:
        tokenizer: The model's tokenizer, a fast one (it has to say where each token ends).
        context_tokens: The length of the whole prompt, template included, in the model's own
            tokens. The text is cut at a word, so the prompt is this long or a few tokens shorter.
        depth: Where the needle is: 0 is the start of the text, 1 its end.
        city: What the needle is about.
        number: What has to be answered.
        text: The text to hide the needle in, at least as long as the prompt.

    Returns:
        `input_ids`, an int64 tensor `[1, tokens]`.

    Raises:
        ValueError: `text` is too short to fill the prompt, or `context_tokens` leaves no room
            for any of it.
    """
    needle = Needle(city, number, depth)
    return fitted_prompt(tokenizer, context_tokens, text, needle.question, needle)


def fitted_prompt(
    tokenizer: Any, context_tokens: int, text: str, question: str, needle: Needle | None = None
) -> Any:
    """Builds the token ids of a question about the start of `text`, cut to fit.

    Args:
        tokenizer: The model's tokenizer.
        context_tokens: The length of the prompt, as in `needle_prompt`.
        text: The text to cut, at least as long as the prompt.
        question: What to ask about it.
        needle: The fact to hide in the text, if any.

    Returns:
        `input_ids`, an int64 tensor `[1, tokens]`.

    Raises:
        ValueError: As in `needle_prompt`.
    """

    def encoded(part: str) -> Any:
        return encode_question(tokenizer, needle.hide_in(part) if needle else part, question)

    alone = encoded("").shape[1]
    room = context_tokens - alone
    # Pieces may take more tokens joined than alone: shorten the text until the prompt fits.
    while room >= 1:
        ids = encoded(_first_tokens(tokenizer, text, room))
        excess = ids.shape[1] - context_tokens
        if excess <= 0:
            return ids
        room -= excess
    raise ValueError(
        f"context_tokens: got {context_tokens}, expected room for text beside the question, which "
        f"takes {alone} tokens alone; use at least {max(context_tokens, alone) + SOME}"
    )


def encode_question(tokenizer: Any, text: str, question: str) -> Any:
    """Returns the ids `[1, tokens]` of `text` and then `question`, in the chat template if any."""
    message = f"{text}\n\n{question}"
    if getattr(tokenizer, "chat_template", None):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        return ids["input_ids"]
    return tokenizer(message, return_tensors="pt").input_ids


def _first_tokens(tokenizer: Any, text: str, count: int) -> str:
    """Returns the start of `text` that fills `count` tokens, cut back to a whole word."""
    chars = 8 * count
    while True:
        encoded = tokenizer(
            text[:chars], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        if len(encoded.input_ids) >= count:
            break
        if chars >= len(text):
            raise ValueError(
                f"text: got {len(encoded.input_ids)} tokens, but {count} are needed to fill the "
                "prompt; give a longer text or ask for a smaller context_tokens"
            )
        chars *= 2
    start = text[: encoded.offset_mapping[count - 1][1]]
    return start[: max(start.rfind(" "), start.rfind("\n"), 1)]
