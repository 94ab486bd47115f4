"""Needle prompts: as long as asked for, with the fact where asked for and the question last."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oasis_hf.tools.needle import Needle, fitted_prompt, needle_prompt

SENTENCES = [f"Sentence number {n} tells about nothing in particular." for n in range(200)]
TEXT = " ".join(SENTENCES)


@pytest.fixture(scope="module", params=["plain", "chat"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """One token per character, so that lengths can be checked exactly."""
    characters = sorted({*map(chr, range(32, 127)), "\n"})
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")
    if request.param == "chat":
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
    return tokenizer


def text_of(tokenizer: Any, ids: Any) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids[0].tolist()))


@pytest.mark.parametrize("context_tokens", [400, 1000, 3001])
def test_the_prompt_fills_the_context_to_the_last_word(tokenizer: Any, context_tokens: int) -> None:
    ids = needle_prompt(tokenizer, context_tokens, 0.5, "Oslo", 73920, TEXT)
    longest_word = max(map(len, TEXT.split()))
    assert ids.shape[0] == 1
    assert context_tokens - longest_word - 2 <= ids.shape[1] <= context_tokens


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_needle_stands_between_sentences_at_its_depth(tokenizer: Any, depth: float) -> None:
    ids = needle_prompt(tokenizer, 3000, depth, "Oslo", 73920, TEXT)
    prompt = text_of(tokenizer, ids)
    sentence = Needle("Oslo", 73920).sentence
    assert prompt.count(sentence) == 1
    before, after = prompt.split(sentence)
    before = before.removeprefix("<user>").rstrip()
    assert not before or before.endswith(".") or depth == 1.0
    assert abs(len(before) / len(prompt) - depth) < 0.1
    assert "What is the special magic number for Oslo" in after


def test_the_question_comes_last(tokenizer: Any) -> None:
    prompt = text_of(tokenizer, fitted_prompt(tokenizer, 600, TEXT, "Why?"))
    assert prompt.endswith("\n\nWhy?" + ("<assistant>" if tokenizer.chat_template else ""))


@pytest.mark.parametrize(
    ("context_tokens", "text", "message"),
    [(100, TEXT, "use at least"), (1000, "Too short.", "longer text")],
    ids=["no room", "short text"],
)
def test_a_prompt_that_cannot_be_filled_is_an_error(
    tokenizer: Any, context_tokens: int, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        needle_prompt(tokenizer, context_tokens, 0.5, "Oslo", 73920, text)


def test_a_depth_outside_the_text_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"depth: got 1\.5"):
        Needle(depth=1.5)


def test_the_needle_fits_into_texts_without_sentences() -> None:
    assert Needle(depth=0.5).hide_in("") == Needle().sentence
    assert Needle().sentence in Needle(depth=0.5).hide_in("no full stop here")
