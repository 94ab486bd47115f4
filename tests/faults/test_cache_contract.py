"""What Transformers' caches offer, offered by this one too, or refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    Driver,
    assert_close,
    build_model,
    cache_argument,
    dense_cache,
    forward,
    generate,
    left_padded,
    prompt,
    tiny_model,
)
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from oasis_hf import OasisCache, OasisUnsupportedError


def takes_lengths() -> bool:
    """Whether `crop` of the installed Transformers takes the length to keep."""
    try:
        DynamicLayer().crop(1)
    except ValueError:
        return False
    return True


ALWAYS_CHECKPOINTS = "__call__" in vars(GradientCheckpointingLayer)
"""Whether layers are checkpointed without gradients too."""

LENGTHS = pytest.mark.skipif(not takes_lengths(), reason="this Transformers refuses it too")


# ---- keys and values -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keys", "values"])
def test_keys_and_values_of_a_layer(name: str) -> None:
    """In store, tail and ring; padding, which is not stored, is zeros."""
    model = tiny_model("llama")
    ids, mask = left_padded([0, 9], 60)
    caches = [dense_cache(model), OasisCache(model, **FULL)]
    for cache in caches:
        assert getattr(cache.layers[0], name, None) is None
        forward(model, ids, cache, mask)
        for _ in range(2):
            mask_now = torch.ones(2, cache.get_seq_length() + 1, dtype=torch.long)
            mask_now[:, :60] = mask
            forward(model, ids[:, :1].clamp(min=3), cache, mask_now)
        cache.crop(-1)
        cache.reorder_cache(torch.tensor([1, 0]))
    for dense, ours in zip(*(cache.layers for cache in caches), strict=True):
        want, got = getattr(dense, name), getattr(ours, name)
        real = mask_now[[1, 0], :-1].bool()[:, None, :, None]
        assert_close(got, want.where(real, 0))
    caches[1].reset()
    assert getattr(caches[1].layers[0], name) is None


def test_keys_of_sequences_without_a_token() -> None:
    driver = Driver(**FULL)
    driver.feed_random(torch.Generator(), 2, 3, torch.zeros(2, 3))
    assert torch.equal(driver.layer.keys, torch.zeros(2, 2, 3, 16))


def test_keys_cannot_be_set() -> None:
    driver = Driver(**FULL)
    driver.feed_random(torch.Generator(), 1, 3)
    with pytest.raises(OasisUnsupportedError, match=r"keys cannot be set.*cache\.crop"):
        driver.layer.keys = torch.zeros(1, 2, 3, 16)


# ---- crop ----------------------------------------------------------------------------------------


@LENGTHS
@pytest.mark.parametrize("kept", [1, 30, 59, 60, 100])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_crop_to_a_length(kind: str, kept: int) -> None:
    """Where Transformers still takes it, with the same meaning."""
    model = tiny_model(kind)
    # A sliding layer whose window is full takes no length.
    ids = prompt(60) if kind == "llama" else prompt(30)
    logits = []
    for cache in (dense_cache(model), OasisCache(model, **FULL)):
        forward(model, ids, cache)
        cache.crop(kept)
        assert cache.get_seq_length() == min(kept, ids.shape[1])
        logits.append(forward(model, ids[:, :1], cache))
    assert_close(logits[1], logits[0])


@LENGTHS
def test_layer_is_cropped_to_a_length() -> None:
    driver = Driver(**FULL)
    driver.feed_random(torch.Generator(), 1, 40)
    driver.layer.crop(30)
    assert driver.layer.get_seq_length() == 30


@pytest.mark.skipif(takes_lengths(), reason="this Transformers takes it")
def test_crop_to_a_length_is_refused_where_transformers_does() -> None:
    driver = Driver(**FULL)
    driver.feed_random(torch.Generator(), 1, 40)
    for crop in (driver.cache.crop, driver.layer.crop):
        with pytest.raises(ValueError, match=r"crop: got 30, .*use crop\(30 - cache.get_seq"):
            crop(30)
    assert driver.cache.get_seq_length() == driver.layer.get_seq_length() == 40


@pytest.mark.parametrize("number", [-10, torch.tensor(-10), torch.tensor([-10])])
def test_crop_takes_tensors_of_one_number(number: Any) -> None:
    driver = Driver(**FULL)
    driver.feed_random(torch.Generator(), 1, 40)
    driver.cache.crop(number)
    assert driver.cache.get_seq_length() == 30


@pytest.mark.parametrize("number", [-2.5, torch.tensor(-2.5), torch.tensor([-1, -2]), "3"])
def test_crop_by_what_is_no_number_of_tokens(number: Any) -> None:
    """A fraction was cut off before."""
    driver = Driver(**FULL)
    driver.feed_random(torch.Generator(), 1, 40)
    with pytest.raises(ValueError, match=r"crop: got .*expected a whole number"):
        driver.cache.crop(number)
    assert driver.cache.get_seq_length() == 40


@pytest.mark.parametrize("removed", [0, 1, 3, 4, 20])
def test_accepted_drafts_are_never_negative(removed: int) -> None:
    """A crop may reach further back than what was verified."""
    generator = torch.Generator()
    driver = Driver(**FULL)
    driver.feed_random(generator, 1, 40)
    driver.cache.expect_drafts()
    driver.feed_random(generator, 1, 4)
    driver.cache.crop(-removed)
    stats = driver.cache.stats()
    assert (stats.drafted, stats.accepted) == (3, max(0, 3 - removed))


# ---- training mode -------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [True, False], ids=["of the model", "of its config"])
def test_gradient_checkpointing_is_named(hooked: bool) -> None:
    """It takes the cache from the layers, always or where gradients are recorded."""
    model = build_model("Llama", {})
    cache = OasisCache(model if hooked else model.config, **FULL)
    ids = prompt(40)
    forward(model, ids[:, :20], cache)
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(OasisUnsupportedError, match=r"gradient checkpointing.*model\.eval\(\)"):
        model(input_ids=ids[:, 20:], **{cache_argument(model): cache})
    assert cache.get_seq_length() == 20
    model.eval()
    assert torch.equal(generate(model, ids, cache, 4), generate(model, ids, dense_cache(model), 4))


@pytest.mark.skipif(not ALWAYS_CHECKPOINTS, reason="checkpoints only where gradients are recorded")
def test_gradient_checkpointing_around_generate_is_named() -> None:
    model = build_model("Llama", {})
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(OasisUnsupportedError, match=r"gradient_checkpointing_disable\(\)"):
        generate(model, prompt(40), OasisCache(model, **FULL), 4)


@pytest.mark.skipif(ALWAYS_CHECKPOINTS, reason="this Transformers withholds the cache here too")
def test_gradient_checkpointing_without_gradients_generates_the_same() -> None:
    model = build_model("Llama", {})
    model.gradient_checkpointing_enable()
    model.train()
    ids = prompt(40)
    got = generate(model, ids, OasisCache(model, **FULL), 4)
    assert torch.equal(got, generate(model, ids, dense_cache(model), 4))


def test_attention_dropout_is_refused() -> None:
    """It would be left out."""
    model = build_model("Llama", {"attention_dropout": 0.5}).train()
    cache = OasisCache(model, **FULL)
    with pytest.raises(OasisUnsupportedError, match=r"dropout 0.5.*model\.eval\(\)"):
        forward(model, prompt(20), cache)
    assert cache.get_seq_length() == 0
