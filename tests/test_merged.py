"""Linear modules as one product: the same outputs, and a model that stays what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import build_model, cache_argument, forward, prompt
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from oasis_hf import OasisCache
from oasis_hf.graphs.capture import Dispatcher
from oasis_hf.graphs.fused import FusedLayers
from oasis_hf.graphs.merged import merge


class Heads(nn.Module):
    """What attention modules have."""

    def __init__(self, bias: bool = False, kind: Any = nn.Linear) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 24, bias=bias)
        self.k_proj = kind(16, 8, bias=bias)
        self.v_proj = nn.Linear(16, 8, bias=bias)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Queries of one input, keys and values of another."""
        other = x if other is None else other
        return torch.cat([self.q_proj(x), self.k_proj(other), self.v_proj(other)], -1)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_one_product_gives_what_three_give(bias: bool) -> None:
    """Also when keys come from another input, when one is called alone, or twice."""
    torch.manual_seed(0)
    heads, x, other = Heads(bias), torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    want, crossed, alone = heads(x), heads(x, other), heads.k_proj(x)
    (merged,) = merge(heads)
    torch.testing.assert_close(heads(x), want, atol=0, rtol=0)
    with merged:
        torch.testing.assert_close(heads(x), want)
        torch.testing.assert_close(heads(x, other), crossed)
        torch.testing.assert_close(heads.k_proj(x), alone)
        before = heads.k_proj(x)
        x.mul_(2)
        assert not torch.equal(heads.k_proj(x), before)
        torch.testing.assert_close(heads(x / 2), want)
        heads.v_proj(x)
    assert not any("forward" in vars(module) for module in merged.modules)
    assert merged._input is None and merged._parts == [None] * 3


@torch.no_grad()
def test_weights_take_no_more_memory_and_follow_the_model() -> None:
    """They are views of one memory; what is loaded into the model is what is multiplied."""
    heads, x = Heads(), torch.randn(1, 16)
    (merged,) = merge(heads)
    assert merged.moved
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in heads.parameters()}
    assert [x.nbytes() for x in storages.values()] == [sum(p.nbytes for p in heads.parameters())]
    (again,) = merge(heads)
    assert not again.moved
    heads.load_state_dict(Heads().state_dict())
    want = heads(x)
    for one in (merged, again):
        with one:
            torch.testing.assert_close(heads(x), want)


def test_only_plain_modules_are_merged() -> None:
    """An adapter, a replaced forward, mixed kinds and a part of a family stay as they are."""

    class Adapter(nn.Linear):
        """Computes something else."""

    assert not merge(Heads(kind=Adapter))
    hooked = Heads()
    hooked.v_proj.forward = hooked.v_proj.forward
    assert not merge(hooked)
    mixed = Heads()
    mixed.k_proj.to(torch.float64)
    assert not merge(mixed)
    biased = Heads()
    biased.k_proj.bias = nn.Parameter(torch.zeros(8))
    assert not merge(biased)
    lone = Heads()
    del lone.v_proj
    assert not merge(lone)


def test_a_compiled_layer_has_four_products_not_seven() -> None:
    """Within `active`; outside, the modules run their own code."""
    torch._dynamo.reset()
    model = build_model("Llama", {"num_hidden_layers": 1})
    cache, products = OasisCache(model, budget=64), []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes]
        products.append(sum("linear" in target for target in targets))
        return graph.forward

    layers = FusedLayers(model, backend=backend)
    assert layers.moved
    logits = forward(model, prompt(100), cache)[:, -1]
    with layers.active():
        forward(model, logits.argmax(-1, keepdim=True), cache)
    assert sum(products) == 4
    own = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert not any("forward" in vars(module) for module in own)


def test_what_was_captured_before_weights_moved_is_captured_anew() -> None:
    """Graphs of every cache of the model; those captured after it stay."""
    model = build_model("Llama", {"num_hidden_layers": 2})
    caches = [OasisCache(model, budget=64, compile=on) for on in (False, True, True)]
    plain, first, second = (Dispatcher.add(model, cache) for cache in caches)
    stale: dict[Any, Any] = {("key",): object()}
    plain._entries = dict(stale)
    with first._compiling(caches[1]):
        assert not plain._entries
    plain._entries = dict(stale)
    with second._compiling(caches[2]):
        assert plain._entries == stale


def test_a_merged_model_is_saved_as_before(tmp_path: Path) -> None:
    """A folder that loads, with the same tokens."""
    model = build_model("Llama", {"num_hidden_layers": 2})
    ids, name = prompt(40), cache_argument(model)
    want = forward(model, ids, OasisCache(model, budget=64))
    FusedLayers(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="oasis")
    with torch.no_grad():
        got = loaded(ids, **{name: OasisCache(loaded, budget=64)}).logits
    torch.testing.assert_close(got, want)
    assert loaded.state_dict().keys() == model.state_dict().keys()
