"""A text whose beginning is not what the cache was fed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    assert_close,
    dense_cache,
    draft_model,
    forward,
    generate,
    left_padded,
    prompt,
    tiny_model,
)
from torch import Tensor

from oasis_hf import OasisCache, OasisUnsupportedError
from oasis_hf import generation as batched

pytestmark = pytest.mark.usefixtures("small_slabs")


def fresh(kind: str, ids: Tensor, tokens: int = 12, **options: Any) -> Tensor:
    """The new tokens of a fresh reading, with Transformers' own attention and cache."""
    reference = tiny_model(kind, "sdpa")
    return generate(reference, ids, dense_cache(reference), tokens, **options)


def rewritten(text: Tensor, first: int, last: int, new: int = 9) -> Tensor:
    """A text without tokens first..last, as a template leaves earlier reasoning out, and more."""
    return torch.cat([text[:, :first], text[:, last:], prompt(new, len(text), seed=8)], 1)


WAYS = {
    "plain": {},
    "pieces": {"prefill_chunk_size": 16},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [(80, 84), (99, 100), (60, 100)], ids=str)
def test_rewritten_history_is_read_again_from_the_first_difference(
    way: str, cut: tuple[int, int]
) -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    ids = prompt(90)
    text = torch.cat([ids, generate(model, ids, cache, 20)], 1)
    second = rewritten(text, *cut)
    options = WAYS[way]
    if way == "beams":
        cache.batch_repeat_interleave(2)
    with pytest.warns(UserWarning, match=rf"differs from what the cache holds from token {cut[0]}"):
        got = generate(model, second, cache, 12, **options)
    assert torch.equal(got, fresh("llama", second, **options))
    assert cache.get_seq_length() == second.shape[1] + 11


def test_only_the_difference_is_read_again() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    text = prompt(120)
    forward(model, text, cache)
    fed = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with pytest.warns(UserWarning, match="differs"):
        generate(model, rewritten(text, 100, 104), cache, 2)
    hook.remove()
    assert fed == [120 - 4 + 9 - 100, 1]


@pytest.mark.parametrize("length", [1, 40, 89, 90, 95])
def test_the_beginning_of_what_is_held_is_answered_anew(length: int) -> None:
    """A prompt asked again, to have another answer."""
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    ids = prompt(90)
    text = torch.cat([ids, generate(model, ids, cache, 20)], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = generate(model, text[:, :length], cache, 12)
    assert torch.equal(got, fresh("llama", text[:, :length]))


def test_rows_of_a_batch_that_differ_at_different_places() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    ids, mask = left_padded([0, 12], 90)
    answer = generate(model, ids, cache, 20, attention_mask=mask)
    text = torch.cat([ids, answer, prompt(5, 2, seed=8)], 1)
    text[0, 100], text[1, 70] = 3, 4
    seen = torch.cat([mask, torch.ones(2, 25).long()], 1)
    with pytest.warns(UserWarning, match="from token 70 on"):
        got = generate(model, text, cache, 12, attention_mask=seen)
    assert torch.equal(got, fresh("llama", text, attention_mask=seen))


def test_another_text_is_refused_and_loses_nothing() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    ids = prompt(90)
    text = torch.cat([ids, generate(model, ids, cache, 20)], 1)
    with pytest.raises(ValueError, match=r"input_ids: got a text of 60 tokens.*cache\.reset\(\)"):
        generate(model, prompt(60, seed=9), cache, 4)
    assert cache.get_seq_length() == 109
    assert torch.equal(generate(model, text, cache, 12), fresh("llama", text))
    cache.reset()
    other = prompt(60, seed=9)
    assert torch.equal(generate(model, other, cache, 12), fresh("llama", other))


def test_layers_that_cannot_go_back_refuse_and_lose_nothing() -> None:
    model = tiny_model("qwen3_next")
    cache = OasisCache(model, **FULL)
    ids = prompt(90)
    text = torch.cat([ids, generate(model, ids, cache, 20)], 1)
    with pytest.raises(RuntimeError, match=r"cannot go back"):
        generate(model, rewritten(text, 90, 100), cache, 4)
    got = generate(model, torch.cat([text, prompt(5, seed=8)], 1), cache, 12)
    assert torch.equal(got, fresh("qwen3_next", torch.cat([text, prompt(5, seed=8)], 1)))


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "custom_generate"])
def test_batched_drafts_read_a_rewritten_text_again(direct: bool) -> None:
    model, draft = tiny_model("llama"), draft_model("llama", "fair")
    cache = OasisCache(model, **FULL)
    ids = prompt(90, 2)
    text = torch.cat([ids, generate(model, ids, cache, 20)], 1)
    second = rewritten(text, 92, 95)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    with pytest.warns(UserWarning, match="from token 92 on"):
        if direct:
            got = batched.generate(
                model, second, past_key_values=cache, assistant_model=draft, **options
            )
        else:
            got = model.generate(
                second,
                past_key_values=cache,
                custom_generate=batched.generate,
                draft=draft,
                **options,
            )
    assert torch.equal(got[:, second.shape[1] :], fresh("llama", second))


@pytest.mark.parametrize("way", ["crop", "fork", "reorder", "commit"])
def test_ids_are_remembered_through_operations(way: str) -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    text = prompt(100, 2)
    forward(model, text, cache)
    if way == "crop":
        cache.crop(-10)
        text = text[:, :90]
    elif way == "fork":
        cache = cache.fork()
    elif way == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
        text = text.flip(0)
    else:
        cache.activate_past_recording()
        cache.commit(4, torch.tensor([4, 2]))
        text = torch.stack([text[0], torch.cat([torch.zeros(2).long(), text[1, :-2]])])
    second = rewritten(text, 80, 84)
    mask = torch.ones_like(second)
    if way == "commit":
        mask[1, :2] = 0
    with pytest.warns(UserWarning, match="from token 80 on"):
        got = generate(model, second, cache, 12, attention_mask=mask)
    assert torch.equal(got, fresh("llama", second, attention_mask=mask))


def test_tokens_that_nobody_told_are_not_compared() -> None:
    """A cache that was fed embeddings answers from what it holds."""
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    text = prompt(100)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(text[:, :60]), past_key_values=cache)
    other = text.clone()
    other[:, 10:20] = 5
    got = generate(model, other, cache, 12)
    assert torch.equal(got, fresh("llama", text))


def test_a_generation_that_fails_at_once_puts_the_text_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    text = prompt(120)
    forward(model, text[:, :100], cache)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="differs"):
        patch.setattr(model.model.layers[1].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="interrupted"):
            generate(model, rewritten(text, 90, 95), cache, 4)
    assert cache.get_seq_length() == 100
    got = forward(model, text[:, 100:], cache)
    assert_close(got, forward(model, text, OasisCache(model, **FULL))[:, 100:])


def test_a_window_that_recorded_too_little_is_refused_and_loses_nothing() -> None:
    """After drafts a sliding layer goes back a little; Transformers crops it by any number."""
    model = tiny_model("gemma3")
    cache = OasisCache(model, **FULL)
    ids = prompt(90)
    text = torch.cat([ids, generate(model, ids, cache, 20, prompt_lookup_num_tokens=3)], 1)
    with pytest.raises(OasisUnsupportedError, match="sliding or recurrent layers cannot go back"):
        generate(model, rewritten(text, 80, 84), cache, 12)
    whole = torch.cat([text, prompt(5, seed=9)], 1)
    assert torch.equal(generate(model, whole, cache, 12), fresh("gemma3", whole))
