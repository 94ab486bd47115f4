"""What surrounds a cache changes nothing: autocast, modes, gradients, defaults, `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    MODELS,
    SPARSE,
    Driver,
    assert_close,
    build_model,
    cache_argument,
    dense_cache,
    generate,
    prompt,
    random_qkv,
    tensors_of,
    tiny_model,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from oasis_hf import OasisCache, OasisUnsupportedError

TOKENS = 4
KINDS = ["llama", "gemma3", "qwen3_next"]
"""Full attention alone; with sliding layers; with recurrent ones."""

Mode = Callable[[], AbstractContextManager[Any]]
MODES: dict[str, Mode] = {
    "gradients": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast on the CPU, or none."""
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def call(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Logits of one call, in whatever surroundings."""
    return model(input_ids=ids, **{cache_argument(model): cache}).logits


def kept(cache: OasisCache) -> dict[str, Tensor]:
    """Every tensor that a cache holds, those of Transformers' own layers among them."""
    found = tensors_of(cache)
    for number, layer in enumerate(cache.layers):
        found |= tensors_of(dict(vars(layer)), f"native.{number}")
    return found


# ---- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"dense_layers": [0]}], ids=["offloaded", "one dense"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "weights, ambient",
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_autocast_around_generate(
    kind: str, weights: torch.dtype, ambient: torch.dtype, options: dict[str, Any]
) -> None:
    """The steps of generate, fed the same tokens: the logits of Transformers' own cache."""
    if options and kind != "llama":
        pytest.skip("no other layer would be left")
    model = build_model(*MODELS[kind]).to(weights)
    ids = prompt(60)
    logits = []
    for cache in (dense_cache(model), OasisCache(model, **FULL, **options)):
        with torch.no_grad(), autocast(ambient):
            steps = [call(model, ids[:, :56], cache)[:, -4:]]
            steps += [call(model, ids[:, n : n + 1], cache) for n in range(56, 60)]
        logits.append(torch.cat(steps, 1).float())
    scale = logits[0].abs().max()
    # Dense attention itself rounds its queries, keys and weights to this dtype; ours does not.
    assert (logits[1] - logits[0]).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * scale
    cosine = nn.functional.cosine_similarity(*logits, dim=-1)
    assert cosine.min() > 0.999


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("ambient", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_not_reach_a_step(ambient: torch.dtype, backend: str) -> None:
    """The very same outputs, prompt and sparse steps."""
    outputs = []
    for around in (None, ambient):
        generator = torch.Generator().manual_seed(1)
        driver = Driver(**SPARSE, backend=backend)
        with autocast(around):
            steps = [driver.feed_random(generator, 1, rows)[1][0] for rows in (150, 1)]
        outputs.append(torch.cat(steps, 2))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_values_in_another_dtype_than_keys(backend: str) -> None:
    """As a float32 model under autocast has them: stored as the keys are."""
    outputs = []
    for narrow in (False, True):
        generator = torch.Generator().manual_seed(1)
        driver = Driver(**SPARSE, backend=backend)
        steps = []
        for rows in (150, 1):
            query, key, value = random_qkv(generator, 1, rows)
            value = value.bfloat16()
            steps.append(driver.feed(query, key, value if narrow else value.float())[0])
        outputs.append(torch.cat(steps, 2))
        assert steps[0].dtype == torch.float32
    assert torch.equal(*outputs)


@pytest.mark.parametrize("first_inside", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_inside_autocast_and_the_next_outside(kind: str, first_inside: bool) -> None:
    model = tiny_model(kind)
    ids = prompt(60)
    logits = []
    for cache in (dense_cache(model), OasisCache(model, **FULL)):
        with torch.no_grad():
            with autocast(torch.bfloat16 if first_inside else None):
                call(model, ids[:, :56], cache)
            with autocast(None if first_inside else torch.bfloat16):
                steps = [call(model, ids[:, n : n + 1], cache) for n in range(56, 60)]
        logits.append(torch.cat(steps, 1).float())
    scale = logits[0].abs().max()
    assert (logits[1] - logits[0]).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * scale


@pytest.mark.parametrize("first_inside", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_half_model_goes_on_outside_autocast(kind: str, first_inside: bool) -> None:
    """Keys and queries of the two forwards have different dtypes, which dense attention refuses."""
    if kind == "qwen3_next" and not first_inside:
        pytest.skip("torch does not join the dtypes of its recurrent state")
    model = build_model(*MODELS[kind]).bfloat16()
    ids = prompt(60)
    cache = OasisCache(model, **FULL)
    with torch.no_grad():
        want = call(model, ids, dense_cache(model))[:, -1].float()
        with autocast(torch.float16 if first_inside else None):
            call(model, ids[:, :59], cache)
        with autocast(None if first_inside else torch.float16):
            got = call(model, ids[:, 59:], cache)[:, -1].float()
    assert (got - want).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * want.abs().max()


# ---- inference mode and gradients ----------------------------------------------------------------


@pytest.mark.parametrize("then", MODES)
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_generate_in_different_modes(kind: str, first: str, then: str) -> None:
    model = tiny_model(kind)
    ids = prompt(60)
    want = generate(model, ids, dense_cache(model), TOKENS)
    cache = OasisCache(model, **FULL)
    with MODES[first]():
        call(model, ids[:, :50], cache)
    with MODES[then]():
        got = generate(model, ids, cache, TOKENS)
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", [*KINDS, "one dense"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_belongs_to_no_mode(kind: str, mode: str, tmp_path: Path) -> None:
    """Neither to inference mode nor to an autograd graph, after every way in which it is made."""
    options = {"dense_layers": [0]} if kind == "one dense" else {}
    model = tiny_model("llama" if options else kind)
    cache = OasisCache(model, **FULL, **options)
    caches = [cache]
    with MODES[mode]():
        ids = prompt(40, 2)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        model(input_ids=ids, attention_mask=mask, **{cache_argument(model): cache})
        model(
            input_ids=ids[:, :1],
            attention_mask=torch.cat([mask, mask[:, -1:]], 1),
            **{cache_argument(model): cache},
        )
        caches.append(cache.fork())
        cache.reorder_cache(torch.tensor([0, 1]))
        if kind != "qwen3_next":
            # Transformers' recurrent layers cannot do these.
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 2]))
        if kind in ("llama", "one dense"):
            cache.crop(-3)
            cache.save(tmp_path / "cache")
            caches.append(OasisCache.load(tmp_path / "cache", model))
    for held in caches:
        for name, tensor in kept(held).items():
            if name.endswith("forward.ids"):
                # The caller's own, of the last forward, and only read.
                continue
            assert not tensor.is_inference(), name
            assert not tensor.requires_grad, name
    for held in caches:
        with torch.no_grad():
            columns = torch.ones(2, held.get_seq_length() + 1, dtype=torch.long)
            columns[0, :3] = 0
            model(
                input_ids=ids[:, :1].clone(),
                attention_mask=columns,
                **{cache_argument(model): held},
            )


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_through_a_cache_is_refused(kind: str) -> None:
    """It would lack what goes through the cache."""
    model = build_model(*MODELS[kind])
    loss = call(model, prompt(20), OasisCache(model, **FULL)).sum()
    with pytest.raises(OasisUnsupportedError, match=r"backward.*train without a cache"):
        loss.backward()


def test_gradient_that_does_not_pass_a_cache_is_right() -> None:
    model = build_model("Llama", {})
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    gradients = []
    for cache in (dense_cache(model), OasisCache(model, **FULL)):
        model.zero_grad()
        call(model, prompt(20), cache).square().mean().backward()
        gradients.append(model.lm_head.weight.grad.clone())
    assert_close(gradients[1], gradients[0])


# ---- defaults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_default_device_does_not_reach_a_cache(backend: str) -> None:
    """The default device is where models are made, not where a cache keeps its tokens."""
    outputs = []
    for surroundings in (nullcontext(), torch.device("meta")):
        generator = torch.Generator().manual_seed(1)
        states = [random_qkv(generator, 2, rows) for rows in (150, 1)]
        driver = Driver(**SPARSE, backend=backend)
        real = torch.ones(2, 150, dtype=torch.bool)
        real[0, :5] = False
        one = real[:, -1:]
        with surroundings:
            steps = [
                driver.feed(*state, mask)[0]
                for state, mask in zip(states, (real, one), strict=True)
            ]
            driver.cache.crop(-1)
            driver.cache.batch_repeat_interleave(2)
        outputs.append(torch.cat(steps, 2))
    assert torch.equal(*outputs)


# ---- torch.compile -------------------------------------------------------------------------------


def compile_in_place(model: PreTrainedModel) -> PreTrainedModel:
    """`model.compile()`."""
    model.compile(backend="eager")
    return model


def compile_forward(model: PreTrainedModel) -> PreTrainedModel:
    """Its forward replaced."""
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.fixture
def _no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_no_compiled_code")
@pytest.mark.parametrize(
    "compiled, cache_first",
    [(compile_in_place, True), (compile_forward, False)],
)
def test_compiled_model_generates_the_same(
    compiled: Callable[[PreTrainedModel], PreTrainedModel], cache_first: bool
) -> None:
    """The cache made before the model is compiled, or after."""
    model = build_model("Llama", {"num_hidden_layers": 1})
    ids = prompt(20)
    want = generate(model, ids, dense_cache(model), 3)
    cache = OasisCache(model, **FULL) if cache_first else None
    compiled(model)
    cache = cache or OasisCache(model, **FULL)
    assert torch.equal(generate(model, ids, cache, 3), want)


@pytest.mark.usefixtures("_no_compiled_code")
def test_compiled_module_around_a_model() -> None:
    """`torch.compile(model)`, called by hand, of a model with layers of two kinds."""
    model = tiny_model("gemma3")
    ids = prompt(20)
    logits = []
    for caller, cache in (
        (model, dense_cache(model)),
        (torch.compile(model, backend="eager"), OasisCache(model, **FULL)),
    ):
        with torch.no_grad():
            steps = [call(caller, ids[:, :18], cache)[:, -1:]]
            steps += [call(caller, ids[:, n : n + 1], cache) for n in (18, 19)]
        logits.append(torch.cat(steps, 1))
    assert_close(logits[1], logits[0])


@pytest.mark.usefixtures("_no_compiled_code")
def test_fullgraph_says_what_to_do() -> None:
    model = build_model("Llama", {"num_hidden_layers": 1})
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="leave out fullgraph=True"):
        call(whole, prompt(20), OasisCache(model.config, **FULL))
