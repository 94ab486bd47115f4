"""Layers compiled around the attention: the same tokens, and a model that is left as it was."""

from __future__ import annotations

import pytest
import torch
from helpers import build_model, cache_argument, forward, prompt
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from oasis_hf import OasisCache
from oasis_hf.graphs.fused import FusedLayers


@pytest.fixture
def model() -> PreTrainedModel:
    """A model that no other test has compiled."""
    torch._dynamo.reset()
    counters.clear()
    return build_model("Llama", {"num_hidden_layers": 3})


def decode(model: PreTrainedModel, fused: bool) -> list[torch.Tensor]:
    """Logits of four steps behind a prompt, the steps compiled or not."""
    cache = OasisCache(model, budget=64)
    ids = prompt(200, 2)
    layers = FusedLayers(model, backend="aot_eager")
    logits = [forward(model, ids, cache)[:, -1]]
    for step in range(4):
        token = logits[-1].argmax(-1, keepdim=True)
        if fused:
            with layers.active():
                logits.append(forward(model, token, cache)[:, -1])
        else:
            logits.append(forward(model, token, cache)[:, -1])
        if step == 1:
            compiled = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == compiled, "a later step compiled again"
    return logits


def test_compiled_layers_decode_the_same(model: PreTrainedModel) -> None:
    """Same logits up to rounding; attention and store stay out of what is compiled."""
    plain = decode(model, fused=False)
    assert not counters["stats"]["unique_graphs"]
    compiled = decode(model, fused=True)
    assert counters["stats"]["unique_graphs"] >= 3
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    reasons = " ".join(counters["graph_break"])
    assert "update" in reasons and "oasis_attention" in reasons


def test_layers_are_put_back(model: PreTrainedModel) -> None:
    """Also after an error inside the block; a forward that someone else set stays out of it."""
    layers = model.model.layers
    own = layers[1].forward
    layers[1].forward = own
    fused = FusedLayers(model, backend="aot_eager")
    assert len(fused) == 2
    with pytest.raises(ZeroDivisionError), fused.active():
        assert "forward" in vars(layers[0])
        raise ZeroDivisionError
    assert "forward" not in vars(layers[0]) and layers[1].forward is own


def test_a_compiled_model_stays_right(model: PreTrainedModel) -> None:
    """torch.compile over the whole model, the user's own: attention is not traced wrongly."""
    ids = prompt(150)
    plain = OasisCache(model, budget=64)
    want = [forward(model, ids, plain)[:, -1], forward(model, ids[:, :1], plain)[:, -1]]
    cache = OasisCache(model, budget=64)
    step = torch.compile(model, backend="eager", dynamic=False)
    with torch.no_grad():
        options = {cache_argument(model): cache}
        got = [step(input_ids=part, **options).logits[:, -1] for part in (ids, ids[:, :1])]
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
