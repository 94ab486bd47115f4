"""A captured graph outlives neither a change of storage nor a change of the model.

Without a GPU a recorder stands in for CUDA: it notes the address of every tensor of the cache when
a step is captured, and fails where a replay would meet others. The GPU's tests are in
test_gpu_operations.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import GPU
from helpers import build_model, forward, prompt, tensors_of
from transformers import PreTrainedModel

pytest.importorskip("triton")

from oasis_hf import OasisCache
from oasis_hf import storage as tiers
from oasis_hf.facts.watch import ModelWatch
from oasis_hf.graphs import capture as graphs
from oasis_hf.graphs.capture import Dispatcher, StepGraphs
from oasis_hf.storage import parts

pytestmark = pytest.mark.skipif(GPU, reason="see test_gpu_operations.py")

OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 16, "sink_tokens": 0, "recent_tokens": 0}


@pytest.fixture
def model() -> PreTrainedModel:
    """A model of its own, with one small layer."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return build_model("Llama", small)


def addresses(cache: OasisCache) -> dict[str, tuple[int, ...]]:
    """Where every tensor that a step uses is."""
    return {
        f"{number}.{path}": (tensor.data_ptr(), *tensor.shape)
        for number, layer in enumerate(cache.offloaded)
        for path, tensor in tensors_of(layer).items()
        if "_rows" not in path
    }


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was captured, in place of CUDA graphs; the first replay is the capture itself."""
    captured: list[Any] = []

    class Recorded:
        def __init__(self, cache: OasisCache) -> None:
            self.cache, self.held, self.replays = cache, addresses(cache), 0

        def replay(self) -> None:
            self.replays += 1
            assert addresses(self.cache) == self.held, "a replay would use stale addresses"

    def capture(
        self: StepGraphs, cache: OasisCache, call: Any, kwargs: Any, entry: Any, coming: Any
    ) -> Any:
        output = self._call(cache, call, kwargs, entry, coming)
        entry.kind, entry.outputs = type(output), {"logits": output.logits}
        entry.cache_field = next(name for name, x in output.items() if x is cache)
        captured.append(Recorded(cache))
        self.captured += 1
        return captured[-1]

    monkeypatch.setattr(graphs.StepGraphs, "_capture", capture)
    return captured


def talker(model: PreTrainedModel) -> OasisCache:
    """A cache of the Triton engine, whose steps go through graphs."""
    cache = OasisCache(model, backend="triton", **OPTIONS)
    cache.graphs = Dispatcher.add(model, cache)
    return cache


def talk(model: PreTrainedModel, cache: OasisCache, steps: int, tokens: int = 70) -> None:
    """A turn, and steps after it."""
    if tokens:
        forward(model, prompt(tokens, seed=steps), cache)
    for step in range(steps):
        forward(model, prompt(1, seed=step), cache)


# ---- storage ---------------------------------------------------------------------------------


class Recycled:
    """Allocators that give the same objects and the same memory out again, at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store: Any = None
        self.tail: Any = None
        recycled = self

        class Store(tiers.PinnedStore):
            def __new__(cls, *_: Any) -> Any:
                if recycled.store is None:
                    recycled.store = super().__new__(cls)
                return recycled.store

        class Ring(parts.Tail):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                if recycled.tail is None:
                    recycled.tail = self.k
                self.k = recycled.tail.zero_()

        monkeypatch.setattr(parts, "store_class", lambda name: Store)
        monkeypatch.setattr(parts, "Tail", Ring)


def test_storage_at_the_same_place_is_other_storage(
    model: PreTrainedModel, recorder: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store is freed, and another with its id and its address takes its place."""
    Recycled(monkeypatch)
    cache = talker(model)
    talk(model, cache, 4)
    assert len(recorder) == 1 and recorder[0].replays == 2
    store, tail = id(cache.offloaded[0].parts.store), cache.offloaded[0].parts.tail.k.data_ptr()
    cache.reset()
    talk(model, cache, 1)
    first = cache.offloaded[0]
    assert (id(first.parts.store), first.parts.tail.k.data_ptr()) == (store, tail)
    talk(model, cache, 2, tokens=0)
    assert recorder[0].replays == 2, "the graph of storage that is gone was replayed"


def test_every_change_of_storage_is_an_epoch_of_its_own() -> None:
    """No number is given twice, whichever layer it is."""
    model = build_model("Llama", {"num_hidden_layers": 2})
    cache = OasisCache(model, **OPTIONS)
    met: list[int] = []

    def changed(what: str, use: Callable[[], Any]) -> None:
        use()
        epochs = [layer.epoch for layer in cache.offloaded]
        assert not set(epochs) & set(met) and len(set(epochs)) == len(epochs), what
        met.extend(epochs)

    changed("prompt", lambda: forward(model, prompt(70, 2), cache))
    changed("growth", lambda: forward(model, prompt(5000, 2), cache))
    changed("repeat", lambda: cache.batch_repeat_interleave(2))
    changed("select", lambda: cache.batch_select_indices(torch.tensor([0, 3])))
    changed("reorder", lambda: cache.reorder_cache(torch.tensor([1, 0])))
    changed("reset", cache.reset)
    changed("another", lambda: forward(model, prompt(70, 1), cache))
    fork = cache.fork()
    assert not {layer.epoch for layer in fork.offloaded} & set(met)
    before = [layer.epoch for layer in cache.offloaded]
    for _ in range(3):
        forward(model, prompt(1, 1), cache)
    cache.crop(-1)
    assert [layer.epoch for layer in cache.offloaded] == before, "a step changes no storage"


def test_a_change_of_any_layer_is_seen(model: PreTrainedModel, recorder: list[Any]) -> None:
    """The first layer stays as it is, another one moves."""
    model = build_model(
        "Llama", {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    )
    cache = talker(model)
    talk(model, cache, 4)
    assert recorder[0].replays == 2
    last = cache.offloaded[-1]
    last.map_batch(torch.Tensor.clone)
    talk(model, cache, 2, tokens=0)
    assert recorder[0].replays == 2


@pytest.mark.parametrize(
    "within",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", enabled=False),
        torch.inference_mode,
    ],
    ids=["autocast", "no autocast", "inference mode"],
)
def test_a_graph_belongs_to_what_it_was_captured_in(
    model: PreTrainedModel, recorder: list[Any], within: Any, request: pytest.FixtureRequest
) -> None:
    """Products of another type, and tensors of another kind, need a graph of their own."""
    cache = talker(model)
    talk(model, cache, 4)
    replays = recorder[0].replays
    with torch.no_grad(), within():
        key = cache.graphs._key(cache, prompt(1), torch.zeros(1, 1, dtype=torch.long), None, {})
    known = key in cache.graphs._entries
    assert known == ("no autocast" in request.node.name) and recorder[0].replays == replays


# ---- the model -------------------------------------------------------------------------------


def replace_weight(model: PreTrainedModel) -> None:
    """One weight is another parameter."""
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())


def replace_module(model: PreTrainedModel) -> None:
    """A module is another one, with the same weights."""
    mlp = model.model.layers[0].mlp
    mlp.down_proj = copy.copy(mlp.down_proj)


class Adapted(torch.nn.Linear):
    """Has what PEFT's layers have."""

    def __init__(self, like: torch.nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, bias=False)
        self.weight = like.weight
        self._active_adapter, self._disable_adapters = ["one"], False
        self.merged_adapters: list[str] = []
        self.scaling = {"one": 1.0, "two": 1.0}


def adapter(model: PreTrainedModel) -> Adapted:
    """The layer's adapter."""
    found: Adapted = model.model.layers[0].self_attn.q_proj
    return found


CHANGES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "a weight": replace_weight,
    "a module": replace_module,
    "to": lambda model: model.to(torch.float64),
    "train": lambda model: model.train(),
    "a hook": lambda model: model.model.norm.register_forward_hook(lambda *_: None),
    "a forward": lambda model: setattr(model.model.norm, "forward", model.model.norm.forward),
    "adapter switched": lambda model: setattr(adapter(model), "_active_adapter", ["two"]),
    "adapters disabled": lambda model: setattr(adapter(model), "_disable_adapters", True),
    "adapter merged": lambda model: adapter(model).merged_adapters.append("one"),
    "adapter scaled": lambda model: adapter(model).scaling.update(one=0.5),
    "assigned": lambda model: model.load_state_dict(
        {name: x.clone() for name, x in model.state_dict().items()}, assign=True
    ),
}
AT_A_GLANCE = {"to", "train", "assigned"} | {name for name in CHANGES if "adapter" in name}
"""What is done to all of a model, and is noticed within a step."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_noticed(model: PreTrainedModel, name: str) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    watch = ModelWatch(model)
    assert watch.changed(thoroughly=True), "nothing was looked at"
    watch.look()
    assert not watch.changed(thoroughly=True) and not watch.changed(thoroughly=False)
    CHANGES[name](model)
    assert watch.changed(thoroughly=True)
    assert watch.changed(thoroughly=False) or name not in AT_A_GLANCE
    watch.look()
    assert not watch.changed(thoroughly=True) and not watch.changed(thoroughly=False)


def test_what_a_graph_reads_anew_is_no_change(model: PreTrainedModel) -> None:
    """Values in place, forwards, other caches, and hooks around the whole model."""
    watch = ModelWatch(model)
    watch.look()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.01
    cache = OasisCache(model, **OPTIONS)
    model.generate(prompt(70), past_key_values=cache, max_new_tokens=3)
    model.eval()
    model.to("cpu")
    assert not watch.changed(thoroughly=True) and not watch.changed(thoroughly=False)


def test_a_weight_at_the_same_place_is_read_anew(model: PreTrainedModel) -> None:
    """A module that died is never taken for the one that has its number now."""
    watch = ModelWatch(model)
    watch.look()
    mlp = model.model.layers[0].mlp
    weight = mlp.down_proj.weight
    for _ in range(50):
        mlp.down_proj = None
        mlp.down_proj = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        mlp.down_proj.weight = weight
        assert watch.changed(thoroughly=True)


@pytest.mark.parametrize("turn", [3, 0], ids=["before a turn", "between two steps"])
def test_no_graph_outlives_a_change_of_the_model(
    model: PreTrainedModel, recorder: list[Any], turn: int
) -> None:
    """The next step runs the model as it is."""
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    cache = talker(model)
    talk(model, cache, 4)
    replays = recorder[0].replays
    assert replays == 2
    adapter(model)._disable_adapters = True
    talk(model, cache, 2, tokens=turn)
    assert recorder[0].replays == replays
    # And is captured again.
    talk(model, cache, 1, tokens=0)
    assert len(recorder) == 2


# ---- what no graph can serve -----------------------------------------------------------------


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("reason", "options", "call"),
    [
        ("the rotary embedding follows the length", {"rope_parameters": ROPE}, {}),
        ("the config asks for more than logits", {"output_hidden_states": True}, {}),
        ("the call has unusual arguments", {}, {"use_cache": True, "return_dict": False}),
    ],
    ids=["rope", "config", "return_dict"],
)
def test_other_steps_run_eagerly(
    recorder: list[Any], reason: str, options: dict[str, Any], call: dict[str, Any]
) -> None:
    """They would be captured wrongly, or not at all; the stats say why."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build_model("Llama", small | options)
    cache = talker(model)
    forward(model, prompt(70), cache)
    with torch.no_grad():
        for _ in range(3):
            model(input_ids=prompt(1), past_key_values=cache, **call)
    assert not recorder and cache.graphs.summary()["eager"][reason] >= 2


def test_gradients_are_no_business_of_graphs(model: PreTrainedModel, recorder: list[Any]) -> None:
    """A replay has no history to go back through."""
    cache = talker(model)
    talk(model, cache, 1)
    for _ in range(3):
        model(input_ids=prompt(1), past_key_values=cache)
    assert not recorder
    assert cache.graphs.summary()["eager"]["gradients are recorded"] == 3
