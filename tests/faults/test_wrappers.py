"""Models inside something else: the cache does for them what it does for the model itself."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from helpers import (
    FULL,
    build_model,
    cache_argument,
    dense_cache,
    draft_model,
    generate,
    left_padded,
    prompt,
    tiny_model,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from oasis_hf import OasisCache, OasisUnsupportedError
from oasis_hf import generation as speculative
from oasis_hf.facts.watch import ModelWatch

PIECE = 16
TOKENS = 4


class Wrapped(nn.Module):
    """A user's own module around a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        return self.model(*args, **kwargs)


def peft_model(model: PreTrainedModel) -> nn.Module:
    """With a LoRA adapter whose weights are not zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config).eval()


def offloaded(model: PreTrainedModel) -> nn.Module:
    """With its weights brought in for each forward."""
    return cpu_offload(model, execution_device=torch.device("cpu"))


def dispatched(model: PreTrainedModel) -> nn.Module:
    """With a hook around the forward of each of its modules."""
    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


WRAPPERS: dict[str, Callable[[PreTrainedModel], nn.Module]] = {
    "peft": peft_model,
    "compiled": functools.partial(torch.compile, backend="eager"),
    "parallel": nn.DataParallel,
    "own module": Wrapped,
    "twice": lambda model: Wrapped(Wrapped(model)),
    "offloaded": offloaded,
    "dispatched": dispatched,
}


@pytest.fixture(params=WRAPPERS)
def wrapped(request: pytest.FixtureRequest) -> nn.Module:
    """A model of its own inside a wrapper."""
    torch._dynamo.reset()
    return WRAPPERS[request.param](build_model("Llama", {}))


def inside(wrapper: nn.Module) -> PreTrainedModel:
    """The model that a wrapper holds."""
    return next(x for x in wrapper.modules() if isinstance(x, PreTrainedModel))


@contextmanager
def rows_read(model: nn.Module) -> Iterator[list[int]]:
    """The numbers of tokens that a model's first layer is given, forward by forward."""
    rows: list[int] = []
    layer = inside(model).model.layers[0]
    watch = layer.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    try:
        yield rows
    finally:
        watch.remove()


def call(model: nn.Module, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    """Logits of one call of the wrapper itself."""
    options[cache_argument(inside(model))] = cache
    with torch.no_grad():
        return model(input_ids=ids, **options).logits


def run(model: nn.Module, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    """New tokens by the wrapper's `generate`, or by that of its model if it has none."""
    owner = model if hasattr(model, "generate") else inside(model)
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    options[cache_argument(inside(model))] = cache
    out = owner.generate(input_ids=ids, max_new_tokens=TOKENS, **options)
    return out[:, ids.shape[1] :]


def test_generates_in_pieces(wrapped: nn.Module) -> None:
    ids = prompt(40)
    want = run(wrapped, ids, dense_cache(inside(wrapped)))
    cache = OasisCache(wrapped, prefill_chunk_size=PIECE, **FULL)
    with rows_read(wrapped) as rows:
        got = run(wrapped, ids, cache)
    assert rows[:4] == [16, 16, 8, 1]
    assert torch.equal(got, want)


def test_call_is_read_in_pieces(wrapped: nn.Module) -> None:
    ids = prompt(40)
    cache = OasisCache(wrapped, prefill_chunk_size=PIECE, **FULL)
    with rows_read(wrapped) as rows:
        got = call(wrapped, ids, cache, logits_to_keep=1)
    want = call(wrapped, ids, dense_cache(inside(wrapped)), logits_to_keep=1)
    assert max(rows) == PIECE
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_tokens_fed_again_are_left_out(wrapped: nn.Module) -> None:
    """Assisted decoding feeds a pre-filled cache the whole prompt."""
    if inside(wrapped).device.type == "meta":
        pytest.skip("Transformers drafts on the device of the weights, which are not there")
    ids = prompt(40)
    draft = draft_model("llama", "bad")
    want = run(wrapped, ids, dense_cache(inside(wrapped)))
    cache = OasisCache(wrapped, **FULL)
    call(wrapped, ids[:, :24], cache)
    got = run(wrapped, ids, cache, assistant_model=draft)
    assert torch.equal(got, want)
    assert cache.get_seq_length() == 40 + TOKENS - 1


def test_broken_forward_is_undone(wrapped: nn.Module) -> None:
    ids = prompt(40)
    want = run(wrapped, ids, dense_cache(inside(wrapped)))
    cache = OasisCache(wrapped, **FULL)
    call(wrapped, ids[:, :24], cache)

    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("broken off")

    breaking = inside(wrapped).model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken off"):
        call(wrapped, ids[:, 24:30], cache)
    breaking.remove()
    assert cache.get_seq_length() == 24
    assert torch.equal(run(wrapped, ids, cache), want)


def test_model_is_left_as_it_was(wrapped: nn.Module) -> None:
    def state() -> dict[str, Any]:
        return {
            name: (
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
                set(vars(module)) & {"forward", "generate"},
            )
            for name, module in wrapped.named_modules()
        }

    before = state()
    cache = OasisCache(wrapped, **FULL)
    call(wrapped, prompt(20), cache)
    del cache
    gc.collect()
    assert state() == before


def test_cache_of_a_wrapper_outlives_it() -> None:
    """A wrapper made for one call, the model held elsewhere."""
    model = build_model("Llama", {})
    cache = OasisCache(Wrapped(model), **FULL)
    gc.collect()
    assert cache.model is model
    ids = prompt(40)
    generate(model, ids, cache, TOKENS)
    again = prompt(40)
    assert torch.equal(
        generate(model, again, cache.fork(), TOKENS),
        generate(model, again, dense_cache(model), TOKENS),
    )


def test_captured_steps_tell_adapters_apart() -> None:
    """A step that was captured with one adapter is not replayed with another."""
    peft = pytest.importorskip("peft")
    model = peft_model(build_model("Llama", {}))
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    watch = ModelWatch(inside(model))
    watch.look()
    assert not watch.changed(thoroughly=False)
    with model.disable_adapter():
        assert watch.changed(thoroughly=False)
    model.merge_adapter()
    assert watch.changed(thoroughly=False)
    model.unmerge_adapter()
    watch.look()
    model.set_adapter("other")
    assert watch.changed(thoroughly=False)


def test_adapter_that_brings_its_own_cache_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(build_model("Llama", {}), config)
    with pytest.raises(OasisUnsupportedError, match=r"PREFIX_TUNING.*cache of its own"):
        OasisCache(model)


def test_adapter_with_tokens_of_its_own() -> None:
    """Prompt tuning: plain generation as with any cache; batched speculation does not feed them."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(build_model("Llama", {}), config).eval()
    ids = prompt(40)
    want = run(model, ids, dense_cache(inside(model)))
    cache = OasisCache(model, **FULL)
    with pytest.raises(OasisUnsupportedError, match="tokens of its own before the prompt"):
        run(model, ids, cache, custom_generate=speculative.generate)
    assert torch.equal(run(model, ids, cache), want)


def test_wrapper_of_several_models_is_refused() -> None:
    both = nn.ModuleList([tiny_model("llama"), tiny_model("qwen3")])
    with pytest.raises(OasisUnsupportedError, match=r"several models \(LlamaFor.*, Qwen3For"):
        OasisCache(both)


def test_forward_past_the_hooks_is_not_silently_whole() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, prefill_chunk_size=PIECE, **FULL)
    options: dict[str, Any] = {cache_argument(model): cache, "logits_to_keep": 1}
    with torch.no_grad(), pytest.warns(UserWarning, match="past the model's hooks"):
        model.forward(input_ids=prompt(40), **options)


@pytest.mark.parametrize("kind", ["peft", "compiled", "own module"])
def test_speculation_takes_a_wrapper(kind: str) -> None:
    """As the model and as its draft, whose positions it has to be told."""
    torch._dynamo.reset()
    model, draft = (WRAPPERS[kind](build_model("Llama", {})) for _ in range(2))
    ids, mask = left_padded([0, 9], 40)
    cache = OasisCache(model, **FULL)
    got = speculative.generate(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=TOKENS,
        draft=draft,
        do_sample=False,
        **{cache_argument(inside(model)): cache},
    )
    want = run(model, ids, dense_cache(inside(model)), attention_mask=mask)
    assert torch.equal(got[:, 40:], want)
    stats = cache.stats()
    # One round of each sequence; its last token is the model's own.
    assert (stats.rounds, stats.accepted) == (1, 2 * (TOKENS - 2))
