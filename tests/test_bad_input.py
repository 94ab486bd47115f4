"""What cannot work says so: the argument, what was got, what to do; and nothing is broken after."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import (
    FULL,
    MODELS,
    assert_close,
    build_model,
    dense_cache,
    forward,
    generate,
    left_padded,
    prompt,
    tiny_model,
)
from safetensors.torch import save_file

from oasis_hf import OasisCache, OasisConfigError, OasisUnsupportedError
from oasis_hf.saving.persistence import SavedCacheError
from oasis_hf.storage import limits
from oasis_hf.storage.limits import HostMemoryError
from oasis_hf.tools import tiny


def says(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    """Assert that a message holds all of `parts`, in this order."""
    message, start = str(error.value), 0
    for part in parts:
        assert part in message[start:], f"{part!r} not found, or out of order, in: {message}"
        start = message.index(part, start)


def assert_works(model: Any = None) -> None:
    """Assert that a new cache gives Transformers' own tokens: no error left anything behind."""
    model, ids = model or tiny_model("llama"), prompt(20)
    want = generate(model, ids, dense_cache(model), tokens=3)
    assert torch.equal(generate(model, ids, OasisCache(model, **FULL), tokens=3), want)


def assert_goes_on(model: Any, cache: OasisCache, ids: torch.Tensor) -> None:
    """Assert that `cache`, which should hold `ids` `[B, L]`, reads on as Transformers' own does."""
    dense, more = dense_cache(model), prompt(3, ids.shape[0], seed=9)
    forward(model, ids, dense)
    assert cache.get_seq_length() == ids.shape[1]
    for token in more.split(1, 1):
        assert_close(forward(model, token, cache), forward(model, token, dense))


# ---- options -------------------------------------------------------------------------------------

BAD_OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no budget": ({"budget": 0}, ("budget: got 0", "at least 1 token", "None for all")),
    "budget below none": ({"budget": -16}, ("budget: got -16", "at least 1 token")),
    "budget under the sinks": ({"budget": 3}, ("sink_tokens: got 16", "0 to budget (4)")),
    "block size no power of two": (
        {"block_size": 24},
        ("block_size: got 24", "a power of two such as 16"),
    ),
    "block size zero": ({"block_size": 0}, ("block_size: got 0", "a power of two")),
    "fractional budget": ({"budget": 2048.0}, ("budget: got 2048.0", "a whole number")),
    "budget as text": ({"budget": "2048"}, ("budget: got '2048'", "a whole number")),
    "fractional block": (
        {"block_size": 16.0},
        ("block_size: got 16.0", "'auto' or a power of two"),
    ),
    "block size in words": ({"block_size": "fine"}, ("block_size: got 'fine'", "expected 'auto'")),
    "truth for a count": ({"recent_tokens": True}, ("recent_tokens: got True", "a whole number")),
    "fractional rows": ({"max_rows": 4.5}, ("max_rows: got 4.5", "a whole number")),
    "no rows": ({"max_rows": 0}, ("max_rows: got 0", "expected 1 or more")),
    "fractional piece": (
        {"prefill_chunk_size": 1.5},
        ("prefill_chunk_size: got 1.5", "a positive number of tokens or None"),
    ),
    "empty piece": ({"prefill_chunk_size": 0}, ("prefill_chunk_size: got 0", "or None")),
    "negative recent": ({"recent_tokens": -1}, ("recent_tokens: got -1", "0 or more")),
    "more sinks than budget": (
        {"budget": 64, "sink_tokens": 65},
        ("sink_tokens: got 65", "0 to budget (64)"),
    ),
    "head room under one": ({"head_room": 0.5}, ("head_room: got 0.5", "at least 1")),
    "head room without end": ({"head_room": float("inf")}, ("head_room: got inf", "at least 1")),
    "unknown index": ({"index": "mimax"}, ("index: got 'mimax'", "keys2bit, minmax", "subclass")),
    "unknown backend": ({"backend": "cuda"}, ("backend: got 'cuda'", "auto, reference, triton")),
    "unknown reduction": ({"reduction": "sum"}, ("reduction: got 'sum'", "mean, max")),
    "unknown policy": ({"on_miss": "wait"}, ("on_miss: got 'wait'", "'skip', 'fetch'", "0.01")),
    "no policy": ({"on_miss": None}, ("on_miss: got None", "'skip', 'fetch'", "0.01")),
    "threshold over one": ({"on_miss": 2.0}, ("on_miss: got 2.0", "between 0 and 1")),
    "cap over one": ({"fetch_cap": 3}, ("fetch_cap: got 3", "'auto', None", "between 0 and 1")),
    "cap under nothing": ({"fetch_cap": -0.1}, ("fetch_cap: got -0.1", "0 fetches nothing")),
    "cap by another name": ({"fetch_cap": "link"}, ("fetch_cap: got 'link'", "'auto', None")),
    "threshold without shares": (
        {"on_miss": 0.01, "index": "minmax"},
        ("on_miss: got the threshold 0.01", "'minmax'", "use index='keys2bit'"),
    ),
    "threshold of logits": (
        {"on_miss": 0.01, "reduction": "max"},
        ("on_miss: got the threshold 0.01", "'max'", "reduction='mean'"),
    ),
    "dense layer out of range": (
        {"dense_layers": (0, 7)},
        ("dense_layers: got [7]", "numbers below 2"),
    ),
    "all layers dense": (
        {"dense_layers": (0, 1)},
        ("dense_layers: got [0, 1]", "use DynamicCache"),
    ),
    "negative dense layer": ({"dense_layers": (-1,)}, ("dense_layers: got (-1,)", "like (0, 1)")),
    "dense layer no list": ({"dense_layers": 1}, ("dense_layers: got 1", "like (0, 1)")),
    "unknown option": (
        {"budgets": 64, "window": 3},
        ("got unknown option budgets, window", "expected some of budget, block_size"),
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_option_that_cannot_be_used(case: str) -> None:
    options, parts = BAD_OPTIONS[case]
    model = tiny_model("llama")
    before = len(model._forward_pre_hooks)
    with pytest.raises(OasisConfigError) as error:
        OasisCache(model, **options)
    says(error, *parts)
    # Fewer if a cache of an earlier test was freed meanwhile.
    assert len(model._forward_pre_hooks) <= before


def test_cutting_prompts_needs_the_model() -> None:
    with pytest.raises(OasisConfigError) as error:
        OasisCache(tiny_model("llama").config, prefill_chunk_size=32)
    says(error, "prefill_chunk_size: needs OasisCache(model, ...)", "pass the model")


def test_keys2bit_needs_dimensions_in_fours() -> None:
    model = build_model("Llama", {"head_dim": 18})
    cache = OasisCache(model, **FULL)
    with pytest.raises(ValueError) as error:
        forward(model, prompt(20), cache)
    says(error, "index 'keys2bit': got head dimension 18", "multiple of 4", "use index='minmax'")
    other = OasisCache(model, **FULL, index="minmax")
    forward(model, prompt(20), other)
    assert_goes_on(model, other, prompt(20))


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["model", "config"])
def test_wrong_attention_implementation(what: str) -> None:
    model = build_model("Llama", {}, attention="sdpa")
    with pytest.raises(OasisUnsupportedError) as error:
        OasisCache(model if what == "model" else model.config)
    says(
        error,
        "attention implementation: got 'sdpa', expected 'oasis'",
        "model.set_attn_implementation('oasis')",
    )
    model.set_attn_implementation("oasis")
    assert_works(model)


def test_attention_implementation_changed_later() -> None:
    model = build_model("Llama", {})
    cache = OasisCache(model, **FULL)
    forward(model, prompt(20), cache)
    model.set_attn_implementation("sdpa")
    with pytest.raises((OasisUnsupportedError, TypeError)) as error:
        forward(model, prompt(1), cache)
    says(error, "set_attn_implementation('oasis')")
    model.set_attn_implementation("oasis")
    assert_goes_on(model, cache, prompt(20))
    assert_works()


def test_no_model_at_all() -> None:
    with pytest.raises(OasisUnsupportedError) as error:
        OasisCache(torch.nn.Linear(2, 2))
    says(error, "model: got Linear", "expected a Transformers model or its config")


def test_latent_attention() -> None:
    model = tiny.tiny_model(tiny.tiny_config("deepseek_v3"), "DeepseekV3ForCausalLM", "oasis")
    with pytest.raises(OasisUnsupportedError) as error:
        OasisCache(model)
    says(error, "deepseek_v3", "multi-head latent attention caches latents, not K and V")
    assert not model._forward_pre_hooks
    assert_works()


def test_encoder_decoder() -> None:
    config = transformers.T5Config(d_model=32, num_layers=1)
    config._attn_implementation = "oasis"
    with pytest.raises(OasisUnsupportedError) as error:
        OasisCache(config)
    says(error, "t5", "encoder-decoder models are not supported")


def test_attention_that_bypasses_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known once the model's code is imported; with a config alone, at the first forward."""
    config = transformers.BloomConfig(vocab_size=128, hidden_size=32, n_layer=1, n_head=2)
    config._attn_implementation = "oasis"
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "transformers.models.bloom.modeling_bloom", raising=False)
        cache = OasisCache(config, **FULL)
    model = transformers.BloomForCausalLM(config).eval()
    with pytest.raises(OasisUnsupportedError) as error:
        forward(model, prompt(8), cache)
    says(error, "bloom", "attention interface", "another attention implementation", "another cache")
    with pytest.raises(OasisUnsupportedError) as error:
        OasisCache(model)
    says(error, "bloom", "attention interface")
    assert_works()


NOT_IMPLEMENTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "softcap": ("gemma2", {}, "Gemma2Attention passes 'softcap'"),
    "sinks": ("gpt_oss", {"layer_types": ["full_attention"] * 4}, "GptOssAttention passes 's_aux'"),
    "sinks behind a window": ("gpt_oss", {}, "GptOssAttention passes 's_aux'"),
}


@pytest.mark.parametrize("case", NOT_IMPLEMENTED)
def test_attention_that_is_not_implemented(case: str) -> None:
    kind, changes, message = NOT_IMPLEMENTED[case]
    model = tiny.tiny_model(tiny.tiny_config(kind, **changes), tiny.class_name(kind), "oasis")
    cache = OasisCache(model, **FULL)
    for _ in range(2):
        with pytest.raises(OasisUnsupportedError) as error:
            forward(model, prompt(8), cache)
        says(error, message, "another attention implementation")
        assert cache.get_seq_length() == 0
    assert_works()


# ---- calls ---------------------------------------------------------------------------------------


def test_batch_size_changed_midway() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    forward(model, prompt(40, 2), cache)
    with pytest.raises(ValueError) as error:
        forward(model, prompt(1, 3), cache)
    says(error, "batch size: got 3, expected 2", "cache.reset()", "cache.batch_select_indices()")
    assert_works()
    assert_goes_on(model, cache, prompt(40, 2))


def test_a_cache_of_another_model() -> None:
    """Two KV heads were announced by the first forward; a model with four is not the same."""
    model = tiny_model("llama")
    other = build_model("Llama", {"num_key_value_heads": 4})
    cache = OasisCache(model, **FULL)
    forward(model, prompt(20), cache)
    with pytest.raises(ValueError) as error:
        forward(other, prompt(1), cache)
    says(error, "layer 0: got keys of (heads", "(4, 16", "expected (2, 16", "use a new cache")
    assert_works(other)
    assert_goes_on(model, cache, prompt(20))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_crop_that_cannot_be(kind: str) -> None:
    model = tiny_model(kind)
    cache = OasisCache(model, **FULL)
    forward(model, prompt(30), cache)
    with pytest.raises(ValueError) as error:
        cache.crop(-2.5)
    says(error, "crop: got -2.5", "expected a whole number")
    with pytest.raises(ValueError) as error:
        cache.crop(-31)
    says(error, "crop: got -31", "holds 30 tokens", "cache.reset()")
    assert_goes_on(model, cache, prompt(30))


def test_four_dimensional_mask() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    forward(model, prompt(20), cache)
    mask = torch.zeros(1, 1, 4, 24)
    with pytest.raises(OasisUnsupportedError) as error, torch.no_grad():
        model(prompt(4), attention_mask=mask, past_key_values=cache)
    says(error, "a custom mask (4D", "pass a 2D attention_mask of ones and zeros")
    assert_works()
    assert_goes_on(model, cache, prompt(20))


@pytest.mark.parametrize("columns", [4, 23, 30])
def test_mask_of_the_wrong_length(columns: int) -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    forward(model, prompt(20), cache)
    mask = torch.ones(1, columns, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(ValueError) as error, torch.no_grad():
        model(prompt(4), attention_mask=mask, past_key_values=cache)
    says(
        error,
        f"attention_mask: got {columns} columns, expected 24",
        "20 in the cache and 4 new",
        "a mask over all of them",
    )
    assert_works()
    assert_goes_on(model, cache, prompt(20))


# ---- memory --------------------------------------------------------------------------------------


def test_host_memory_that_cannot_hold_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to change, "a smaller batch" say; the same cache then takes that."""
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    ids, mask = left_padded([0, 7, 30], 60)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "available_bytes", lambda: 400_000)
        with pytest.raises(HostMemoryError) as error:
            forward(model, ids, cache, mask)
    # 3 sequences x (256 + 16) tokens x 2 heads x (16 + 16) numbers of 4 bytes fit for one layer.
    says(
        error,
        "host memory: 0.00 GB needed",
        "x 3 sequences x 2 layers, 0.00 GB available",
        "use a shorter context, a smaller batch or a machine with more memory",
    )
    assert cache.get_seq_length() == 0 and cache.stats().host_bytes == 0
    assert_works()
    ids, mask = ids[1:2], mask[1:2]
    forward(model, ids, cache, mask)
    cache.crop(-10)
    alone = ids[:, 7:50]
    dense = dense_cache(model)
    forward(model, alone, dense)
    token = prompt(1, seed=3)
    mask = torch.cat([mask[:, :50], torch.ones(1, 1, dtype=torch.long)], 1)
    assert_close(forward(model, token, cache, mask), forward(model, token, dense))


@pytest.mark.usefixtures("small_slabs")
def test_host_memory_that_runs_out_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    cache, ids = OasisCache(model, **FULL), prompt(127)
    forward(model, ids, cache)
    forward(model, prompt(1, seed=9), cache)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "available_bytes", lambda: 0)
        for _ in range(2):
            with pytest.raises(HostMemoryError, match=r"0\.00 GB available"):
                forward(model, prompt(1), cache)
        with pytest.raises(HostMemoryError, match=r"0\.00 GB available"):
            forward(model, prompt(20), cache)
    assert_works()
    assert_goes_on(model, cache, torch.cat([ids, prompt(1, seed=9)], 1))


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A cache of the tiny Llama that read 40 tokens, on disk."""
    model, path = tiny_model("llama"), tmp_path / "cache.safetensors"
    cache = OasisCache(model, **FULL)
    forward(model, prompt(40), cache)
    cache.save(path)
    return path


def test_saved_cache_of_another_model(saved: Path) -> None:
    with pytest.raises(SavedCacheError) as error:
        OasisCache.load(saved, tiny_model("qwen3"))
    says(error, "got model_type='llama', expected 'qwen3'", "belongs to another model")
    with pytest.raises(SavedCacheError) as error:
        OasisCache.load(saved, tiny_model("llama", layers=3))
    says(error, "got num_hidden_layers=2, expected 3", "read the prompt again")
    model = tiny_model("llama")
    assert_goes_on(model, OasisCache.load(saved, model), prompt(40))


def test_saved_cache_of_a_deeper_model(tmp_path: Path) -> None:
    """The mismatch is named, not the saved options that do not fit this model either."""
    deep, path = tiny_model("llama", layers=3), tmp_path / "cache.safetensors"
    cache = OasisCache(deep, **FULL, dense_layers=(2,))
    forward(deep, prompt(10), cache)
    cache.save(path)
    with pytest.raises(SavedCacheError) as error:
        OasisCache.load(path, tiny_model("llama"))
    says(error, "got num_hidden_layers=3, expected 2", "belongs to another model")


def test_saved_cache_of_other_weights(saved: Path) -> None:
    with pytest.raises(SavedCacheError) as error:
        OasisCache.load(saved, tiny_model("llama", seed=1))
    says(error, "saved cache: got weights", "expected", "other weights", "read the prompt again")
    assert_works()


def test_file_that_is_no_saved_cache(saved: Path, tmp_path: Path) -> None:
    model, path = tiny_model("llama"), tmp_path / "other"
    save_file({"weight": torch.zeros(2)}, str(path))
    with pytest.raises(SavedCacheError) as error:
        OasisCache.load(path, model)
    says(error, "got format None, expected 'oasis-hf-cache/2'", str(path), "OasisCache.save")
    path.write_text("not a cache at all")
    with pytest.raises(SavedCacheError) as error:
        OasisCache.load(path, model)
    says(error, "got a file that is not safetensors", "OasisCache.save", f"check {path}")
    path.write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(SavedCacheError) as error:
        OasisCache.load(path, model)
    says(error, "got a file that is not safetensors", f"check {path}")
    with pytest.raises(FileNotFoundError):
        OasisCache.load(tmp_path / "missing", model)
    assert_goes_on(model, OasisCache.load(saved, model), prompt(40))


@pytest.mark.parametrize("kind", MODELS)
def test_the_process_still_works(kind: str) -> None:
    """After all the errors above, in this same process, every model generates."""
    assert_works(tiny_model(kind))


def test_a_cache_collected_while_an_error_is_handled() -> None:
    """torch walks the model's hooks then: the error stays the forward's own, the hooks go later."""
    model = build_model("Llama", {})
    caches: list[OasisCache] = []

    def collect(*args: object, **kwargs: object) -> None:
        caches.clear()
        gc.collect()

    model.register_forward_hook(collect, always_call=True)
    caches += [OasisCache(model) for _ in range(3)]
    assert len(model._forward_hooks) == 4
    with pytest.raises(IndexError):
        model(torch.full((1, 4), 10**6))
    assert not caches
    OasisCache(model)
    gc.collect()
    assert len(model._forward_hooks) == 1 and not model._forward_pre_hooks
