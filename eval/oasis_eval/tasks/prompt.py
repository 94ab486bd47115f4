"""Ids of a conversation about a text: the text and its first question, then further questions."""

from __future__ import annotations

from typing import Any

from oasis_hf.tools.needle import encode_question

STAND_IN = "stand-in-for-an-answer"
"""Marks where an answer stands in a rendered conversation."""


def opening(tokenizer: Any, text: str, question: str, lead_in: str) -> list[int]:
    """Ids of the text, the question and the start of the answer."""
    return encode_question(tokenizer, text, question)[0].tolist() + plain(tokenizer, lead_in)


def follow_up(tokenizer: Any, question: str, lead_in: str) -> list[int]:
    """Ids from the end of an answer to the start of the next one."""
    if not getattr(tokenizer, "chat_template", None):
        return plain(tokenizer, f"\n\n{question}\n") + plain(tokenizer, lead_in)
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": STAND_IN},
            {"role": "user", "content": question},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    return plain(tokenizer, rendered.split(STAND_IN)[1]) + plain(tokenizer, lead_in)


def plain(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, with nothing added."""
    if not text:
        return []
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids
