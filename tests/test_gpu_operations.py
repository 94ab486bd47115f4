"""Changes of a cache and of its model on a GPU: in bounds, by graphs too, with transfers on their
way. Uses in any order are in test_dialogues.py and test_random_operations.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import (
    assert_close,
    assert_greedy,
    build_model,
    cache_argument,
    dense_cache,
    forward,
    generate,
    prompt,
)
from torch import Tensor
from transformers import PreTrainedModel

from oasis_hf import OasisCache
from oasis_hf.config import OasisConfig
from oasis_hf.layers.forward import Forward, Kind
from oasis_hf.layers.layer import OasisLayer
from oasis_hf.layers.ledger import PaddingLedger
from oasis_hf.ops import AttentionSpec
from oasis_hf.step.inputs import AttentionInputs
from oasis_hf.storage.streams import Beside

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE = {"head_dim": 64, "num_hidden_layers": 3, "hidden_size": 128}
FULL = 4096
"""A budget that covers every context here."""

graphs_too = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.backends.cuda.matmul.allow_tf32 = False
    return build_model("Llama", WIDE).to("cuda")


class Guards:
    """Memory of a known pattern, in whatever gaps there are next to that of a cache."""

    SIZES = (512, 1024, 2048, 8192, 65536, 1 << 20)

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def put(self, each: int = 24) -> None:
        """Fill gaps that have come about."""
        for size in self.SIZES:
            for _ in range(each):
                self._held.append(torch.full((size,), 0x5A, dtype=torch.uint8, device="cuda"))

    def check(self) -> None:
        """Nobody wrote there."""
        torch.cuda.synchronize()
        changed = [len(held) for held in self._held if bool((held != 0x5A).any())]
        assert not changed, f"guards of {sorted(set(changed))} bytes were overwritten"


CHANGES: dict[str, tuple[Callable[[OasisCache], Any], list[int]]] = {
    "repeat": (lambda cache: cache.batch_repeat_interleave(6), [0] * 6 + [1] * 6),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "select more": (
        lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1, 1, 0])),
        [1, 0, 1, 1, 0],
    ),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0], device="cuda")), [1, 0]),
}


@graphs_too
def test_one_prompt_becomes_six_rows(model: PreTrainedModel, graphs: bool) -> None:
    """A prompt is read once, and continued by six rows: right tokens, and nothing overwritten."""
    ids, guards = prompt(1500).to("cuda"), Guards()
    guards.put()
    cache = OasisCache(model, budget=FULL, graphs=graphs)
    guards.put()
    forward(model, ids[:, :-1], cache, logits_to_keep=1)
    guards.put()
    cache.batch_repeat_interleave(6)
    guards.put()
    rows = ids.repeat(6, 1)
    new = generate(model, rows, cache, 40)
    guards.check()
    assert torch.equal(rows, ids.repeat(6, 1)), "the caller's ids"
    assert_greedy(model, rows, new)
    if graphs:
        assert cache.graphs is not None and cache.graphs.summary()["replayed"] > 20


@graphs_too
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("steps", [0, 6], ids=["after a prompt", "after decode steps"])
@pytest.mark.parametrize("budget", [128, FULL])
def test_a_change_of_batch_stays_in_bounds(
    model: PreTrainedModel, graphs: bool, name: str, steps: int, budget: int
) -> None:
    """At full budget the logits are those of `DynamicCache`; at any, nothing is overwritten."""
    operation, rows = CHANGES[name]
    guards, dense = Guards(), dense_cache(model)
    cache = OasisCache(model, budget=budget, graphs=graphs)
    ids = prompt(700, 2).to("cuda")
    tokens = prompt(steps + 1, 2, seed=3).to("cuda").split(1, 1)[:steps]
    for part in (ids, *tokens):
        guards.put(2)
        forward(model, part, cache)
        forward(model, part, dense)
    operation(cache)
    dense.batch_select_indices(torch.tensor(rows, device="cuda"))
    for token in prompt(40, len(rows), seed=4).to("cuda").split(1, 1):
        guards.put(1)
        got, want = forward(model, token, cache), forward(model, token, dense)
        assert bool(torch.isfinite(got).all())
        if budget == FULL:
            assert_close(got, want, rounding=1024)
    guards.check()
    if graphs:
        assert cache.graphs is not None and cache.graphs.summary()["replayed"] > 20


@graphs_too
def test_another_batch_after_a_reset(model: PreTrainedModel, graphs: bool) -> None:
    """Growing and shrinking, again and again in the same memory."""
    cache, guards = OasisCache(model, budget=FULL, graphs=graphs), Guards()
    for number, batch in enumerate((1, 6, 2, 5, 1, 1, 4)):
        ids = prompt(500, batch, number).to("cuda")
        assert_greedy(model, ids, generate(model, ids, cache, 12))
        guards.put(4)
        cache.reset()
    guards.check()


# ---- graphs ------------------------------------------------------------------------------------


def test_storage_at_the_same_place_is_other_storage(model: PreTrainedModel) -> None:
    """Stores are freed and others allocated where they were."""
    cache = OasisCache(model, budget=FULL)
    met: set[int] = set()
    epochs: set[int] = set()
    again = 0
    for number in range(40):
        ids = prompt(300, 2, number).to("cuda")
        new = generate(model, ids, cache, 8)
        assert_greedy(model, ids, new)
        first = cache.offloaded[0]
        place = first.parts.tail.k.data_ptr()
        again += place in met
        met.add(place)
        assert first.epoch not in epochs
        epochs.add(first.epoch)
        cache.reset()
    assert again, "no memory was given twice"


def in_turn(model: PreTrainedModel, change: Callable[[], Any], turn: int) -> None:
    """Steps by graphs, a change of the model, and steps that must be those of the changed one."""
    caches = [OasisCache(model, budget=FULL, graphs=graphs) for graphs in (True, False)]
    ids = prompt(200, 2).to("cuda")
    for part in (ids, *prompt(6, 2, seed=1).to("cuda").split(1, 1)):
        for cache in caches:
            forward(model, part, cache)
    graphs = caches[0].graphs
    assert graphs is not None and graphs.summary()["replayed"] > 1
    change()
    parts = prompt(6, 2, seed=2).to("cuda").split(1, 1)
    for part in (*([prompt(turn, 2, seed=5).to("cuda")] if turn else []), *parts):
        got, want = (forward(model, part, cache) for cache in caches)
        assert_close(got, want, rounding=1024)
    assert graphs.captured > 1, "captured again"


@pytest.mark.parametrize("turn", [5, 0], ids=["before a turn", "between two steps"])
def test_no_graph_outlives_new_weights(turn: int) -> None:
    """All weights are other tensors, which hold something else; the old ones are freed."""
    model = build_model("Llama", WIDE).to("cuda")
    other = build_model("Llama", WIDE, seed=3).state_dict()

    def change() -> None:
        model.load_state_dict({name: x.to("cuda") for name, x in other.items()}, assign=True)
        gc.collect()
        torch.cuda.empty_cache()

    in_turn(model, change, turn)


@pytest.mark.parametrize("turn", [5, 0], ids=["before a turn", "between two steps"])
def test_no_graph_outlives_an_adapter(turn: int) -> None:
    """A module that adds to a product, or not, by an attribute as PEFT's layers have it."""

    class Adapted(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if self._disable_adapters else 1.5 * y

    model = build_model("Llama", WIDE).to("cuda")
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = Adapted
        layer.mlp.down_proj._disable_adapters = False

    def change() -> None:
        for layer in model.model.layers:
            layer.mlp.down_proj._disable_adapters = True

    in_turn(model, change, turn)


def test_a_hook_that_steers_is_not_left_out() -> None:
    model = build_model("Llama", WIDE).to("cuda")
    hook = model.model.layers[1].register_forward_hook
    in_turn(model, lambda: hook(lambda module, args, output: output * 1.25), 5)


def test_under_autocast_no_graph_is_replayed(model: PreTrainedModel) -> None:
    """It casts weights anew in each block, to memory that a graph would outlive."""
    cache = OasisCache(model, budget=FULL)
    forward(model, prompt(200, 1).to("cuda"), cache)
    for token in prompt(4, 1, seed=2).to("cuda").split(1, 1):
        forward(model, token, cache)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for token in prompt(4, 1, seed=1).to("cuda").split(1, 1):
            forward(model, token, cache)
    assert cache.graphs is not None and cache.graphs.captured == 1
    summary = cache.graphs.summary()
    assert summary["eager"]["autocast is on"] == 4
    forward(model, prompt(1, 1, seed=3).to("cuda"), cache)
    assert cache.graphs.summary()["replayed"] == summary["replayed"] + 1


def test_a_rotary_embedding_that_follows_the_length_runs_eagerly() -> None:
    """It reads positions on the host, which no capture allows."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = build_model("Llama", WIDE | {"rope_parameters": rope}).to("cuda")
    ids = prompt(300).to("cuda")
    cache = OasisCache(model, budget=FULL)
    assert_greedy(model, ids, generate(model, ids, cache, 10))
    assert cache.graphs is not None and not cache.graphs.captured


# ---- transfers on their way ----------------------------------------------------------------------


@contextmanager
def late(monkeypatch: pytest.MonkeyPatch, cycles: int) -> Iterator[None]:
    """Within the block, what runs on a side stream starts late."""
    original = Beside.run

    @contextmanager
    def delayed(self: Beside, *tensors: Tensor) -> Iterator[list[Tensor]]:
        with original(self, *tensors) as used:
            torch.cuda._sleep(cycles)
            yield used

    with monkeypatch.context() as patch:
        patch.setattr(Beside, "run", delayed)
        yield


def test_a_replay_waits_for_what_an_eager_step_left(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a second turn is eager, and the next one a graph of the first turn."""
    options = {"budget": 128, "on_miss": "skip", "fetch_cap": None}
    steps = prompt(16, 2, seed=2).to("cuda").split(1, 1)

    def talk() -> list[Tensor]:
        cache, logits = OasisCache(model, **options), []
        for turn in (prompt(700, 2, 1), prompt(40, 2, 3), prompt(40, 2, 4)):
            forward(model, turn.to("cuda"), cache, logits_to_keep=1)
            logits += [forward(model, token, cache) for token in steps]
        assert cache.graphs is not None and cache.graphs.summary()["replayed"] > 20
        return logits

    want = talk()
    with late(monkeypatch, 3_000_000):
        got = talk()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_cache_may_die_while_its_transfers_run(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is given to others only once the transfers have ended."""
    options = {"budget": 128, "on_miss": "skip", "fetch_cap": None, "graphs": False}
    ids = prompt(1500, 2).to("cuda")
    for number in range(3):
        cache = OasisCache(model, **options)
        forward(model, ids, cache, logits_to_keep=1)
        size = cache.offloaded[0].parts.pool.k.nbytes
        for token in prompt(4, 2, seed=number).to("cuda").split(1, 1):
            forward(model, token, cache)
        with late(monkeypatch, 60_000_000):
            forward(model, ids[:, :1], cache)
        del cache
        taken = [
            torch.full((size,), 0x5A, dtype=torch.uint8, device="cuda")
            for _ in range(4 * WIDE["num_hidden_layers"])
        ]
        torch.cuda.synchronize()
        assert not any(bool((x != 0x5A).any()) for x in taken), "a dead cache wrote there"


@pytest.mark.parametrize("options", [{}, {"index": "minmax"}, {"on_miss": "skip"}])
def test_a_step_never_waits_for_the_device(options: dict[str, Any]) -> None:
    """Torch raises at any operation that would."""
    config = OasisConfig(backend="triton", budget=64, recent_tokens=0, max_rows=4, **options)
    layer = OasisLayer(config, 0, PaddingLedger())
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    states = draw(2, 2, 300, 64)
    layer.adopt(states, states, torch.tensor([300, 300], device="cuda"), 300)
    for step in range(40):
        query, key = draw(2, 4, 1, 64), draw(2, 2, 1, 64)
        layer.forward = Forward(Kind.DECODE, layer.columns, 1)
        # What is compiled and measured once may wait.
        torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
        try:
            layer.attend(AttentionInputs(query, key, key, None, AttentionSpec(0.125)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert int(layer.parts.frontier.committed[0]) > 300


def test_two_caches_take_turns_by_graphs(model: PreTrainedModel) -> None:
    """Every other step is another cache's; each has the tokens that it has alone."""
    name = cache_argument(model)
    prompts = [prompt(300, 1, 3).to("cuda"), prompt(420, 1, 4).to("cuda")]

    def steps(caches: list[OasisCache], chosen: list[Tensor], count: int) -> list[list[Tensor]]:
        logits: list[list[Tensor]] = [[] for _ in caches]
        with torch.no_grad():
            for ids, cache, kept in zip(chosen, caches, logits, strict=True):
                out = model(input_ids=ids, logits_to_keep=1, **{name: cache})
                kept.append(out.logits[:, -1])
            for _ in range(count):
                for cache, kept in zip(caches, logits, strict=True):
                    token = kept[-1].argmax(-1, keepdim=True)
                    kept.append(model(input_ids=token, **{name: cache}).logits[:, -1])
        return logits

    alone = [steps([OasisCache(model, budget=128)], [ids], 30)[0] for ids in prompts]
    together = steps([OasisCache(model, budget=128) for _ in prompts], prompts, 30)
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
