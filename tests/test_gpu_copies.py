"""Copies and files of a cache on a GPU: with graphs, pinned memory and side streams."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import build_model, forward, generate, prompt
from transformers import PreTrainedModel

from oasis_hf import OasisCache
from oasis_hf.saving.fingerprint import fingerprint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDE = {"head_dim": 64, "num_hidden_layers": 3, "hidden_size": 128}
SPARSE: dict[str, Any] = {"budget": 256, "on_miss": "skip", "fetch_cap": 0.25}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.backends.cuda.matmul.allow_tf32 = False
    return build_model("Llama", WIDE).to("cuda")


def decoded(model: PreTrainedModel, cache: Any, steps: int = 40, seed: int = 3) -> torch.Tensor:
    """Logits `[1, steps, V]` of decode steps with given tokens, by graphs where they are on."""
    tokens = prompt(steps, seed=seed).to("cuda").split(1, 1)
    return torch.cat([forward(model, token, cache) for token in tokens], 1)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_copy_goes_on_bit_for_bit_and_independently(model: PreTrainedModel, graphs: bool) -> None:
    cache = OasisCache(model, **SPARSE, graphs=graphs)
    forward(model, prompt(2000).to("cuda"), cache)
    decoded(model, cache)
    copied, untouched = copy.deepcopy(cache), copy.deepcopy(cache)
    other = decoded(model, copied, seed=4)
    want = decoded(model, cache)
    assert torch.equal(decoded(model, untouched), want)
    assert not torch.equal(other, want)
    if graphs:
        assert untouched.graphs is not None and untouched.graphs.replayed


def test_a_copied_model_runs_on_its_own_weights_and_graphs(model: PreTrainedModel) -> None:
    other = build_model("Llama", WIDE, seed=1).to("cuda")
    ids = prompt(500).to("cuda")
    cache = OasisCache(model, budget=1024)
    before = generate(model, ids, cache)
    copied = copy.deepcopy(model)
    copied.load_state_dict(other.state_dict())
    want = generate(other, ids, OasisCache(other, budget=1024))
    assert torch.equal(generate(copied, ids, OasisCache(copied, budget=1024)), want)
    cache.reset()
    assert torch.equal(generate(model, ids, cache), before)


def test_a_model_is_the_same_on_every_device(model: PreTrainedModel, tmp_path: Path) -> None:
    """What one device saved the other reads."""
    there = copy.deepcopy(model).to("cpu")
    here = fingerprint(model)
    assert fingerprint(there).weights == here.weights and fingerprint(there).same_rope(here)
    ids = prompt(500)
    for source, target in ((model, there), (there, model)):
        cache = OasisCache(source, budget=1024)
        forward(source, ids.to(source.device), cache)
        cache.save(tmp_path / "cache")
        loaded = OasisCache.load(tmp_path / "cache", target)
        assert loaded.get_seq_length() == 500
        assert {layer.device.type for layer in loaded.offloaded} == {target.device.type}
        forward(target, prompt(1, seed=2).to(target.device), loaded)


def test_a_large_models_weights_are_read_in_a_moment() -> None:
    """8 B parameters in 16 bits: what a decode step reads, in well under a second."""
    size = 4096
    layers = [torch.nn.Linear(size, size, bias=False, device="meta") for _ in range(480)]
    large = torch.nn.ModuleList(layers).bfloat16().to_empty(device="cuda")
    fingerprint(large)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fingerprint(large)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 1000


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_file_is_read_into_a_model_that_is_spread_over_devices(tmp_path: Path) -> None:
    from accelerate import dispatch_model

    whole = build_model("Llama", WIDE)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.layers.2": 1, "model.norm": 1, "lm_head": 1}
    spread = dispatch_model(copy.deepcopy(whole), places)
    cache = OasisCache(spread, budget=1024)
    forward(spread, prompt(500).to("cuda:0"), cache)
    cache.save(tmp_path / "cache")
    loaded = OasisCache.load(tmp_path / "cache", spread)
    assert [layer.device for layer in loaded.offloaded] == [
        layer.device for layer in cache.offloaded
    ]
    token = prompt(1, seed=2).to("cuda:0")
    assert torch.equal(forward(spread, token, loaded), forward(spread, token, cache.fork()))
