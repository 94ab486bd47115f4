"""A conversation gives the answers of fresh readings, and reads its new tokens only."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FULL, SPARSE, VOCABULARY, build_model, dense_cache, generate, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TextStreamer,
)
from transformers.generation import BaseStreamer

from oasis_hf import Conversation, OasisCache, OasisUnsupportedError
from oasis_hf import generation as batched

pytestmark = pytest.mark.usefixtures("small_slabs")

SPECIAL = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
THOUGHT = "</think>"
WORDS = [*SPECIAL, THOUGHT, *(f"w{number}" for number in range(len(SPECIAL) + 1, VOCABULARY))]

PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = PLAIN.replace("message.content }}", f"message.content.split('{THOUGHT} ')[-1] }}}}")
"""A template that leaves out what was thought before earlier answers, as reasoning models have."""

TOKENS = 12
OPTIONS: dict[str, Any] = {
    "max_new_tokens": TOKENS,
    "do_sample": False,
    # A special token is not part of the answer, so the template would not write it again.
    "suppress_tokens": list(range(len(SPECIAL) + 1)),
}
DOCUMENT = " ".join(WORDS[20 + (7 * number) % 100] for number in range(60))
QUESTIONS = ["w10 w20 w30", "w40", "w50 w11"]


def tokenizer(template: str | None = PLAIN) -> Any:
    """One token for each word."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
    )
    made.chat_template = template
    return made


def ids_of(words: Any, messages: list[dict[str, Any]]) -> Tensor:
    return words.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


def fresh(kind: str, words: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """The answer of Transformers' own attention and cache to messages that it reads anew."""
    reference = tiny_model(kind, "sdpa")
    given = OPTIONS | options
    tokens = given.pop("max_new_tokens")
    new = generate(reference, ids_of(words, messages), dense_cache(reference), tokens, **given)
    return words.decode(new[0], skip_special_tokens=True)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How many tokens each forward of a model is fed."""
    fed: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield fed
    hook.remove()


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


class Thinks(LogitsProcessor):
    """Ends the thought after some tokens."""

    def __init__(self, prompt: int, tokens: int = 5) -> None:
        self._end = prompt + tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self._end:
            scores = torch.full_like(scores, float("-inf"))
            scores[:, WORDS.index(THOUGHT)] = 0.0
        return scores


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [None, DOCUMENT], ids=["plain", "document"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_every_answer_is_that_of_a_fresh_reading(kind: str, system: str | None) -> None:
    words = tokenizer()
    conversation = Conversation(tiny_model(kind), words, system=system, **FULL)
    asked = [{"role": "system", "content": system}] if system else []
    with no_warning():
        for question in QUESTIONS:
            asked.append(user(question))
            answer = conversation.reply(question, **OPTIONS)
            assert answer == fresh(kind, words, asked)
            asked.append({"role": "assistant", "content": answer})
            assert conversation.messages == asked


def test_a_later_turn_reads_its_own_tokens_only() -> None:
    model, words = tiny_model("llama"), tokenizer()
    conversation = Conversation(model, words, system=DOCUMENT, **FULL)
    with counted(model) as fed:
        conversation.reply(QUESTIONS[0], **OPTIONS)
        first = len(ids_of(words, conversation.messages[:2])[0])
        assert fed == [first] + [1] * (TOKENS - 1) and conversation.tokens_read == first
        fed.clear()
        conversation.reply(QUESTIONS[1], **OPTIONS)
    # The last token of the answer, its end, and user, question, end, assistant.
    assert fed == [2 + 4] + [1] * (TOKENS - 1) and conversation.tokens_read == 6


@pytest.mark.parametrize("question", ["w40", " ".join([DOCUMENT] * 2)], ids=["short", "long"])
def test_a_template_that_leaves_out_earlier_thoughts_is_followed_without_a_warning(
    question: str,
) -> None:
    """Also where most of the next text is new, which another call would be refused for."""
    model, words = tiny_model("llama"), tokenizer(FORGETFUL)
    conversation = Conversation(model, words, budget=1024, recent_tokens=8)
    thinks = LogitsProcessorList([Thinks(len(ids_of(words, [user("w10 w20")])[0]))])
    with no_warning(), counted(model) as fed:
        thought = conversation.reply("w10 w20", logits_processor=thinks, **OPTIONS)
        assert thought.split()[5] == THOUGHT
        fed.clear()
        answer = conversation.reply(question, **OPTIONS)
    assert answer == fresh("llama", words, conversation.messages[:-1])
    assert conversation.messages[1]["content"] == thought, "the thought is kept in the messages"
    second = ids_of(words, conversation.messages[:-1])[0]
    # What stood before the first answer is kept: user, two words, end, assistant.
    assert fed[0] == len(second) - 5 == conversation.tokens_read


def test_tokens_that_decode_to_nothing_are_no_part_of_the_answer() -> None:
    """They are read again without them."""
    model, words = tiny_model("llama"), tokenizer()
    conversation = Conversation(model, words, **FULL)
    options = OPTIONS | {"suppress_tokens": None, "max_new_tokens": 40}
    with no_warning():
        first = conversation.reply("w10", logits_processor=[Ends(9)], **options)
        second = conversation.reply("w40", **OPTIONS)
    assert "<|end|>" not in first and len(first.split()) < 40
    assert second == fresh("llama", words, conversation.messages[:-1])


class Ends(LogitsProcessor):
    """Makes one of the tokens a special one."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self._place:
            scores = torch.full_like(scores, float("-inf"))
            scores[:, WORDS.index("<|end|>")] = 0.0
        return scores


def test_a_model_that_cannot_go_back_reads_again_and_says_so() -> None:
    model, words = tiny_model("gemma3"), tokenizer(FORGETFUL)
    conversation = Conversation(model, words, system=DOCUMENT, **FULL)
    start = [{"role": "system", "content": DOCUMENT}, user("w10")]
    thinks = LogitsProcessorList([Thinks(len(ids_of(words, start)[0]))])
    conversation.reply("w10", logits_processor=thinks, **OPTIONS)
    with pytest.warns(UserWarning, match="conversation: the cache cannot go back"):
        answer = conversation.reply("w40", **OPTIONS)
    assert answer == fresh("gemma3", words, conversation.messages[:-1])
    with no_warning():
        assert conversation.reply("w41", **OPTIONS) == fresh(
            "gemma3", words, conversation.messages[:-1]
        )


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": 3},
        {"return_dict_in_generate": True},
        {"custom_generate": batched.generate, "prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 16},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_generate_are_passed_on(options: dict[str, Any]) -> None:
    words = tokenizer()
    conversation = Conversation(tiny_model("llama"), words, system=DOCUMENT, **FULL)
    for number, question in enumerate(QUESTIONS):
        given = OPTIONS | (options if number != 1 else {})
        answer = conversation.reply(question, **given)
        assert answer == fresh("llama", words, conversation.messages[:-1])


def test_several_messages_may_be_said_at_once() -> None:
    words = tokenizer()
    conversation = Conversation(tiny_model("llama"), words, **FULL)
    said = [user("w10"), {"role": "assistant", "content": "w11"}, {"role": "tool", "content": ""}]
    answer = conversation.reply(said, **OPTIONS)
    assert answer == fresh("llama", words, said)
    assert conversation.messages == [*said, {"role": "assistant", "content": answer}]


def test_a_wrapped_model_answers_too() -> None:
    words = tokenizer()
    wrapped = torch.nn.Sequential(tiny_model("llama"))
    conversation = Conversation(wrapped, words, **FULL)
    assert conversation.reply("w10", **OPTIONS) == fresh("llama", words, [user("w10")])


def test_arguments_of_the_template_are_passed_on() -> None:
    words = tokenizer(PLAIN + "{% if hint %} {{ hint }}{% endif %}")
    conversation = Conversation(
        tiny_model("llama"), words, template_options={"hint": "w77"}, **FULL
    )
    plain = tokenizer(PLAIN + " w77")
    assert conversation.reply("w10", **OPTIONS) == fresh("llama", plain, [user("w10")])


# ---- the messages --------------------------------------------------------------------------------


def test_reset_keeps_the_document_and_what_was_read_of_it() -> None:
    model, words = tiny_model("llama"), tokenizer()
    conversation = Conversation(model, words, system=DOCUMENT, **FULL)
    for question in QUESTIONS:
        conversation.reply(question, **OPTIONS)
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": DOCUMENT}]
    with no_warning():
        answer = conversation.reply("w99 w98", **OPTIONS)
    assert answer == fresh("llama", words, conversation.messages[:-1])
    # Two words, end, assistant.
    assert conversation.tokens_read == 4


def test_messages_may_be_changed_between_turns() -> None:
    words = tokenizer()
    conversation = Conversation(tiny_model("llama"), words, system=DOCUMENT, **FULL)
    for question in QUESTIONS:
        conversation.reply(question, **OPTIONS)
    conversation.messages[1]["content"] = "w99 w98"
    del conversation.messages[3:]
    with no_warning():
        answer = conversation.reply("w60", **OPTIONS)
    assert answer == fresh("llama", words, conversation.messages[:-1])
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": DOCUMENT}]


def test_a_conversation_goes_on_from_a_saved_cache(tmp_path: Path) -> None:
    model, words = tiny_model("llama"), tokenizer()
    conversation = Conversation(model, words, system=DOCUMENT, **FULL)
    conversation.reply(QUESTIONS[0], **OPTIONS)
    conversation.cache.save(tmp_path / "chat.safetensors")
    messages = copy.deepcopy(conversation.messages)

    loaded = OasisCache.load(tmp_path / "chat.safetensors", model)
    again = Conversation(model, words, loaded, messages=messages)
    with no_warning():
        answer = again.reply(QUESTIONS[1], **OPTIONS)
    assert again.tokens_read == 6
    assert answer == conversation.reply(QUESTIONS[1], **OPTIONS)


def test_a_fork_of_the_cache_is_a_branch() -> None:
    model, words = tiny_model("llama"), tokenizer()
    trunk = Conversation(model, words, system=DOCUMENT, **FULL)
    trunk.reply(QUESTIONS[0], **OPTIONS)
    branch = Conversation(model, words, trunk.cache.fork(), messages=trunk.messages)
    branch.reply(QUESTIONS[1], **OPTIONS)
    other = Conversation(model, words, trunk.cache.fork(), system=DOCUMENT)
    with no_warning():
        answer = other.reply(QUESTIONS[2], **OPTIONS)
    assert answer == fresh("llama", words, other.messages[:-1])
    assert len(trunk.messages) == 3 and len(branch.messages) == 5
    assert other.tokens_read == 4


# ---- streaming -----------------------------------------------------------------------------------


def test_a_streamer_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = tokenizer()
    conversation = Conversation(tiny_model("llama"), words, **FULL)
    streamer = TextStreamer(words, skip_prompt=True, skip_special_tokens=True)
    answer = conversation.reply("w10", streamer=streamer, **OPTIONS)
    assert capsys.readouterr().out == answer + "\n"


def test_the_pieces_of_a_stream_are_the_answer() -> None:
    words = tokenizer()
    conversation = Conversation(tiny_model("llama"), words, **FULL)
    for question in QUESTIONS:
        pieces = list(conversation.stream(question, **OPTIONS))
        assert len([piece for piece in pieces if piece]) == TOKENS
        assert "".join(pieces) == conversation.messages[-1]["content"]
        assert "".join(pieces) == fresh("llama", words, conversation.messages[:-1])


def test_a_stream_that_is_left_early_is_no_turn() -> None:
    words = tokenizer()
    conversation = Conversation(tiny_model("llama"), words, system=DOCUMENT, **FULL)
    conversation.reply(QUESTIONS[0], **OPTIONS)
    before = copy.deepcopy(conversation.messages)
    pieces = conversation.stream("w40", **(OPTIONS | {"max_new_tokens": 3000}))
    next(piece for piece in pieces if piece)
    pieces.close()
    assert conversation.cache.get_seq_length() < 3000
    assert conversation.messages == before
    assert conversation.reply("w41", **OPTIONS) == fresh("llama", words, conversation.messages[:-1])


def test_an_error_ends_a_stream() -> None:
    conversation = Conversation(tiny_model("llama"), tokenizer(), **FULL)
    with pytest.raises(ValueError, match="message: got an empty"):
        list(conversation.stream(" "))
    with pytest.raises(ValueError, match="max_new_tokens"):
        list(conversation.stream("w10", max_new_tokens=-1))
    assert conversation.messages == []


# ---- failures ------------------------------------------------------------------------------------


class Fails(BaseStreamer):
    """Raises an error after some tokens."""

    def __init__(self, error: type[BaseException], tokens: int) -> None:
        self._error, self._left = error, tokens

    def put(self, value: Tensor) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._error("interrupted")

    def end(self) -> None:
        """Never reached."""


def failing(error: type[BaseException], after: int) -> Any:
    """A layer's `forward` that raises an error in a call."""
    calls = iter(range(10**6))

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if next(calls) == after:
            raise error("interrupted")
        return x

    return forward


@pytest.mark.filterwarnings("ignore:conversation. the cache cannot go back")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["prompt", "step", "between steps", "lookup"])
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_a_turn_that_fails_leaves_the_conversation_whole(
    kind: str, turn: int, place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "lookup" and kind == "qwen3_next":
        pytest.skip("Transformers refuses drafts for a recurrent state")
    model, words = tiny_model(kind), tokenizer()
    conversation = Conversation(model, words, system=DOCUMENT, **FULL)
    for question in QUESTIONS[:turn]:
        conversation.reply(question, **OPTIONS)
    before = copy.deepcopy(conversation.messages)
    with monkeypatch.context() as patch, pytest.raises(error, match="interrupted"):
        options = dict(OPTIONS)
        if place in ("between steps", "lookup"):
            options["streamer"] = Fails(error, 4)
        else:
            layer = model.model.layers[1].mlp
            patch.setattr(layer, "forward", failing(error, 0 if place == "prompt" else 3))
        if place == "lookup":
            options["prompt_lookup_num_tokens"] = 3
        conversation.reply("w90 w91", **options)
    assert conversation.messages == before
    for question in QUESTIONS[:2]:
        answer = conversation.reply(question, **OPTIONS)
        assert answer == fresh(kind, words, conversation.messages[:-1])


def test_a_turn_tried_again_does_not_read_its_question_twice() -> None:
    conversation = Conversation(tiny_model("llama"), tokenizer(), system=DOCUMENT, **FULL)
    with pytest.raises(RuntimeError):
        conversation.reply("w90", streamer=Fails(RuntimeError, 4), **OPTIONS)
    conversation.reply("w90", **OPTIONS)
    assert conversation.tokens_read == 1


@pytest.mark.parametrize("quiet", [True, False], ids=["emptied", "held"])
def test_a_cache_that_others_fed_is_refused_and_kept(quiet: bool) -> None:
    model, words = tiny_model("llama"), tokenizer()
    conversation = Conversation(model, words, system=DOCUMENT, **FULL)
    conversation.reply("w10", **OPTIONS)
    cache = conversation.cache
    cache.reset()
    if not quiet:
        generate(model, ids_of(words, [user(" ".join(WORDS[-50:]))]), cache, 4)
        held = cache.get_seq_length()
        with pytest.raises(ValueError, match=r"cache: holds .* tokens, of which only the first 0"):
            conversation.reply("w11", **OPTIONS)
        assert cache.get_seq_length() == held and len(conversation.messages) == 3
        cache.reset()
    assert conversation.reply("w11", **OPTIONS) == fresh("llama", words, conversation.messages[:-1])


def test_a_cache_whose_tokens_nobody_told_is_refused() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    with torch.no_grad():
        model(inputs_embeds=torch.ones(1, 60, 64), past_key_values=cache)
    conversation = Conversation(model, tokenizer(), cache, system=DOCUMENT)
    with pytest.raises(ValueError, match="cache: holds 60 tokens, of which only the first 0"):
        conversation.reply("w11", **OPTIONS)


def used(model: Any) -> OasisCache:
    cache = OasisCache(model, **SPARSE)
    generate(model, torch.tensor([[5, 6, 7]]), cache, 1)
    return cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": tokenizer(None)}, r"tokenizer: got .* without a chat template.*instruct"),
        ({"cache": DynamicCache()}, "cache: got DynamicCache, expected an OasisCache"),
        ({"cache": OasisCache(tiny_model("llama")), "budget": 64}, "budget: got an option, and a"),
        ({"cache": OasisCache(tiny_model("llama").config)}, "cache: .* from a config"),
        ({"cache": OasisCache(tiny_model("qwen3"))}, "cache: .* from another model"),
        ({"cache": used(tiny_model("llama"))}, "cache: holds 3 tokens already"),
        ({"system": "  "}, "system: got an empty message"),
        ({"messages": [{"role": "User", "content": "w9"}]}, "messages: got role 'User', expected"),
        ({"messages": [{"content": "w9"}]}, "messages: got .*, expected a text or"),
        (
            {"system": "w9", "messages": [{"role": "system", "content": "w9"}]},
            "system: got a text, and messages that begin with",
        ),
        ({"strange": 1}, "got unknown option strange"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_what_makes_no_conversation_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"tokenizer": tokenizer()} | options
    with pytest.raises(ValueError, match=message):
        Conversation(tiny_model("llama"), **given)


def test_a_model_with_other_attention_is_refused() -> None:
    with pytest.raises(OasisUnsupportedError, match="attention implementation: got 'sdpa'"):
        Conversation(tiny_model("llama", "sdpa"), tokenizer())


@pytest.mark.parametrize(
    ("said", "options", "message"),
    [
        ("", {}, "message: got an empty message of role 'user'"),
        (" \n", {}, "message: got an empty message of role 'user'"),
        ([], {}, "message: got no messages"),
        ({"role": "user"}, {}, "message: got an empty message"),
        ({"role": "robot", "content": "w9"}, {}, "message: got role 'robot', expected one of"),
        ({"role": "assistant", "content": "w9"}, {}, "message: got role 'assistant' for the last"),
        ([user("w9"), "w9"], {}, "message: got 'w9', expected a text or"),
        ("w9", {"past_key_values": None}, "past_key_values: the conversation gives it"),
        ("w9", {"input_ids": None}, "input_ids: the conversation gives it"),
        ("w9", {"num_beams": 2}, "num_beams: got 2, expected 1"),
        ("w9", {"num_return_sequences": 3}, "num_return_sequences: got 3, expected 1"),
        ("w9", {"max_new_tokens": -1}, "max_new_tokens"),
        ("w9", {"no_such_option": 1}, "no_such_option"),
    ],
)
def test_what_makes_no_turn_is_refused_and_changes_nothing(
    said: Any, options: dict[str, Any], message: str
) -> None:
    conversation = Conversation(tiny_model("llama"), tokenizer(), system=DOCUMENT, **FULL)
    conversation.reply("w10", **OPTIONS)
    before, held = copy.deepcopy(conversation.messages), conversation.cache.get_seq_length()
    with pytest.raises(ValueError, match=message):
        conversation.reply(said, **options)
    assert conversation.messages == before and conversation.cache.get_seq_length() == held


def test_beams_of_the_models_own_settings_are_refused() -> None:
    model = build_model("Llama", {})
    model.generation_config.num_beams = 3
    with pytest.raises(ValueError, match="num_beams: got 3, expected 1"):
        Conversation(model, tokenizer()).reply("w10")
