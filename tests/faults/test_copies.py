"""Copies of a cache, and of a model while a cache of it is alive."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    MODELS,
    SPARSE,
    build_model,
    cache_argument,
    draft_model,
    forward,
    generate,
    left_padded,
    prompt,
    tensors_of,
    tiny_model,
)
from torch import Tensor

from oasis_hf import OasisCache
from oasis_hf.facts.handle import OasisUnsupportedError
from oasis_hf.graphs.capture import Dispatcher
from oasis_hf.storage import HostMemoryError, limits

pytestmark = pytest.mark.usefixtures("small_slabs")

SKIP: dict[str, Any] = SPARSE | {"on_miss": "skip", "fetch_cap": 0.25, "budget": 32}
"""What is attended to depends on what is resident, so that has to be copied too."""

ENGINES = ["reference", "triton"]
COPIES = {"deepcopy": copy.deepcopy, "copy": copy.copy}


def logits(model: Any, cache: Any, steps: int = 3, seed: int = 3, batch: int = 1) -> Tensor:
    """Logits `[B, steps, V]` of decode steps with given tokens."""
    tokens = prompt(steps, batch, seed=seed).split(1, 1)
    return torch.cat([forward(model, token, cache) for token in tokens], 1)


def after_decoding(backend: str = "reference", **options: Any) -> tuple[Any, OasisCache]:
    """A tiny Llama and a cache that has read a prompt and decoded past a group."""
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("test_gpu_copies.py has the GPU's")
    # In Triton's interpreter a layer's step takes seconds.
    model = tiny_model("llama", layers=1 if backend == "triton" else None)
    cache = OasisCache(model, **(SKIP | options), backend=backend)
    forward(model, prompt(130), cache)
    logits(model, cache, 1 if backend == "triton" else 40)
    return model, cache


@pytest.mark.parametrize(
    "how, backend", [("deepcopy", "reference"), ("copy", "reference"), ("deepcopy", "triton")]
)
def test_a_copy_goes_on_bit_for_bit_and_independently(how: str, backend: str) -> None:
    model, cache = after_decoding(backend)
    copied, untouched = COPIES[how](cache), COPIES[how](cache)
    # Neither sees what another is given.
    steps = 1 if backend == "triton" else 3
    other = logits(model, copied, steps, seed=4)
    want = logits(model, cache, steps)
    assert torch.equal(logits(model, untouched, steps), want)
    assert not torch.equal(other, want)


@pytest.mark.parametrize("backend", ENGINES)
def test_a_copy_shares_no_memory(backend: str) -> None:
    _, cache = after_decoding(backend)
    copied = copy.deepcopy(cache)
    mine, its = tensors_of(cache), tensors_of(copied)
    assert mine.keys() == its.keys()
    places = {tensor.data_ptr() for tensor in mine.values() if tensor.numel()}
    assert not [name for name, x in its.items() if x.numel() and x.data_ptr() in places]


def test_a_copy_has_the_same_stats() -> None:
    _, cache = after_decoding()
    assert copy.deepcopy(cache).stats() == cache.stats()


def test_a_copy_outlives_its_original() -> None:
    model, cache = after_decoding()
    copied = copy.deepcopy(cache)
    want = logits(model, copy.deepcopy(cache))
    del cache
    gc.collect()
    assert torch.equal(logits(model, copied), want)


@pytest.mark.parametrize("kind", MODELS)
def test_a_prompt_used_again_as_the_documentation_of_generate_does_it(kind: str) -> None:
    """`copy.deepcopy` of a dict of arguments that holds a cache, for several questions."""
    model = tiny_model(kind)
    cache = OasisCache(model, **FULL)
    forward(model, prompt(120), cache)
    arguments = {cache_argument(model): cache, "do_sample": False}
    for seed in (1, 2):
        ids = torch.cat([prompt(120), prompt(9, seed=seed)], 1)
        mask = torch.ones_like(ids)
        own = copy.deepcopy(arguments)
        got = model.generate(ids, attention_mask=mask, max_new_tokens=12, **own)
        want = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            **{cache_argument(model): OasisCache(model, **FULL)},
        )
        assert torch.equal(got, want)
        assert cache.get_seq_length() == 120


@pytest.mark.parametrize("options", [{}, {"dense_layers": (1,)}], ids=["offloaded", "dense layer"])
def test_a_copy_of_a_padded_batch(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    ids, mask = left_padded([0, 37, 110], 160)
    cache = OasisCache(model, **SKIP, **options)
    forward(model, ids, cache, mask)
    copied = copy.deepcopy(cache)
    longer = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
    token = prompt(1, 3, seed=8)
    got = forward(model, token, copied, longer)
    assert torch.equal(got, forward(model, token, cache, longer))
    copied.batch_select_indices(torch.tensor([2]))
    assert cache.offloaded[0].batch_size == 3


def test_a_copy_of_an_empty_cache() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    copied = copy.deepcopy(cache)
    want = generate(model, prompt(), OasisCache(model, **FULL))
    assert torch.equal(generate(model, prompt(), copied), want)
    assert not cache.get_seq_length()


def test_a_copy_of_a_cache_that_was_built_from_a_config() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model.config, **SKIP)
    forward(model, prompt(130), cache)
    copied = copy.deepcopy(cache)
    assert copied.model is None
    want = logits(model, cache)
    assert torch.equal(logits(model, copied), want)


def test_a_copy_of_a_cache_whose_model_is_gone() -> None:
    model = build_model("Llama", {})
    cache = OasisCache(model, **SKIP, prefill_chunk_size=64)
    forward(model, prompt(130), cache)
    want = logits(model, copy.deepcopy(cache))
    weights = model.state_dict()
    del model
    gc.collect()
    again = build_model("Llama", {})
    again.load_state_dict(weights)
    assert torch.equal(logits(again, copy.deepcopy(cache)), want)


def test_a_copy_between_two_verifications_of_drafts() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **SKIP)
    forward(model, prompt(130), cache)
    cache.activate_past_recording()
    forward(model, prompt(1, seed=6), cache)
    forward(model, prompt(4, seed=7), cache)
    copied = copy.deepcopy(cache)
    for one in (cache, copied):
        one.crop(-3)
    tokens = prompt(4, seed=8)
    assert torch.equal(forward(model, tokens, copied), forward(model, tokens, cache))
    assert copied.stats() == cache.stats()


def test_a_copy_of_what_was_computed_with_gradients() -> None:
    model, ids = tiny_model("llama"), prompt(130)
    cache = OasisCache(model, **SKIP, dense_layers=(0,))
    with torch.enable_grad():
        model(input_ids=ids, **{cache_argument(model): cache})
    copied = copy.deepcopy(cache)
    assert not any(tensor.requires_grad for tensor in tensors_of(copied).values())
    assert torch.equal(logits(model, copied), logits(model, cache))


def test_a_copy_after_an_interrupt_holds_whole_tokens() -> None:
    model, cache = after_decoding()
    want = logits(model, copy.deepcopy(cache))
    held = cache.get_seq_length()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, prompt(50, seed=9), cache)
    handle.remove()
    copied = copy.deepcopy(cache)
    assert copied.get_seq_length() == held
    assert all(layer.columns == held for layer in copied.offloaded)
    assert logits(model, copied).shape == want.shape


def test_a_cache_that_is_met_twice_is_copied_once() -> None:
    _, cache = after_decoding()
    copied = copy.deepcopy({"one": cache, "other": [cache]})
    assert copied["one"] is copied["other"][0]
    assert copied["one"] is not cache


def test_a_model_copied_with_its_cache_serves_the_copy() -> None:
    model = build_model("Llama", {})
    cache = OasisCache(model, **SKIP)
    forward(model, prompt(130), cache)
    both = copy.deepcopy([model, cache])
    assert both[1].model is both[0]
    assert torch.equal(logits(both[0], both[1]), logits(model, cache))


def test_no_copy_that_does_not_fit_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = after_decoding()
    with monkeypatch.context() as patch:
        patch.setattr(limits, "available_bytes", lambda: 1000)
        with pytest.raises(HostMemoryError, match="a copy of a cache"):
            copy.deepcopy(cache)
    assert torch.equal(logits(model, copy.deepcopy(cache)), logits(model, cache))


@pytest.mark.parametrize("how", [pickle.dumps, lambda x: torch.save(x, io.BytesIO())])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"cache": [x]}], ids=["bare", "inside"])
def test_a_cache_is_not_pickled_and_the_error_names_save(how: Any, wrap: Any) -> None:
    model, cache = after_decoding()
    with pytest.raises(OasisUnsupportedError, match=r"cache\.save\(path\)"):
        how(wrap(cache))
    assert torch.isfinite(logits(model, cache)).all()


@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_layer_is_not_copied_by_itself(how: Any) -> None:
    _, cache = after_decoding()
    with pytest.raises(OasisUnsupportedError, match=r"copy\.deepcopy\(cache\)"):
        how(cache.layers[0])


# ---- the model -----------------------------------------------------------------------------------


def through_a_file(model: Any) -> Any:
    """The model, pickled and read again."""
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("dispatched", [False, True], ids=["hooks", "hooks and graphs"])
@pytest.mark.parametrize("how", [copy.deepcopy, through_a_file])
def test_a_model_copied_while_a_cache_is_alive_runs_on_its_own_weights(
    how: Any, dispatched: bool
) -> None:
    model, other = build_model("Llama", {}), build_model("Llama", {}, seed=1)
    cache = OasisCache(model, **FULL)
    if dispatched:
        # On a GPU a cache does so itself.
        cache.graphs = Dispatcher.add(model, cache)
    before = generate(model, prompt(), cache)
    copied = how(model)
    copied.load_state_dict(other.state_dict())
    want = generate(other, prompt(), OasisCache(other, **FULL))
    assert not torch.equal(before, want)
    assert torch.equal(generate(copied, prompt(), OasisCache(copied, **FULL)), want)
    assert torch.equal(generate(copied, prompt(), use_cache=False), want)
    assert torch.equal(generate(how(copied), prompt(), OasisCache(copied, **FULL)), want)
    cache.reset()
    assert torch.equal(generate(model, prompt(), cache), before), "the original is as it was"


def test_a_model_whose_forward_is_an_instances_own_is_copied_with_it() -> None:
    """As accelerate's hooks replace it."""
    model, other = build_model("Llama", {}), build_model("Llama", {}, seed=1)
    model.forward = model.forward
    cache = OasisCache(model, **FULL)
    cache.graphs = Dispatcher.add(model, cache)
    copied = copy.deepcopy(model)
    copied.load_state_dict(other.state_dict())
    want = generate(other, prompt(), OasisCache(other, **FULL))
    assert torch.equal(generate(copied, prompt(), OasisCache(copied, **FULL)), want)


def test_a_draft_of_a_copied_cache() -> None:
    """Assisted decoding goes on from a copy as from the original."""
    model, ids = tiny_model("llama"), torch.cat([prompt(120), prompt(5, seed=2)], 1)
    cache = OasisCache(model, **FULL)
    forward(model, prompt(120), cache)
    options = {"assistant_model": draft_model("llama", "fair")}
    copied = copy.deepcopy(cache)
    got = generate(model, ids, copied, **options)
    assert torch.equal(got, generate(model, ids, cache, **options))
    assert copied.stats().rounds > 0
