"""Faults that users of such systems have reported: each kind of fault must not exist here.

Each test is named after the kind of fault; the public reports are named in its docstring.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    WINDOW,
    Driver,
    assert_close,
    build_model,
    dense_cache,
    draft_model,
    forward,
    generate,
    left_padded,
    plain_attention,
    prompt,
    random_qkv,
    tensors_of,
    tiny_model,
)
from torch import Tensor

from oasis_hf import OasisCache, OasisUnsupportedError
from oasis_hf.storage import PinnedStore, limits
from oasis_hf.storage.limits import HostMemoryError
from oasis_hf.tools import tiny

pytestmark = pytest.mark.usefixtures("small_slabs")


def both(kind: str, **options: Any) -> tuple[Any, OasisCache, Any, Any]:
    """A model with a cache of full budget, and its twin with Transformers' own attention."""
    model, reference = tiny_model(kind), tiny_model(kind, "sdpa")
    return model, OasisCache(model, **(FULL | options)), reference, dense_cache(reference)


def dense_answer(kind: str, ids: Tensor, tokens: int, **options: Any) -> Tensor:
    """The new tokens with Transformers' own attention and cache."""
    reference = tiny_model(kind, "sdpa")
    return generate(reference, ids, dense_cache(reference), tokens=tokens, **options)


def repetitive(length: int, period: int = 11) -> Tensor:
    """A text `[1, length]` that repeats itself, so that looking drafts up finds some."""
    return prompt(period, seed=2).repeat(1, -(-length // period))[:, :length]


# ---- sliding windows, recurrent layers, layers without K and V -----------------------------------


@pytest.mark.parametrize("draft", ["good", "fair", "lookup"])
def test_window_crossed_within_a_burst_of_drafts(draft: str) -> None:
    """transformers #48280: more K and V columns than the mask has."""
    model, cache, _, _ = both("gemma3")
    ids, tokens = repetitive(WINDOW - 6), 20
    if draft == "lookup":
        options: dict[str, Any] = {"prompt_lookup_num_tokens": 9}
    else:
        options = {"assistant_model": draft_model("gemma3", draft)}
    got = generate(model, ids, cache, tokens=tokens, **options)
    assert torch.equal(got, dense_answer("gemma3", ids, tokens))
    assert cache.get_seq_length() > WINDOW and cache.stats().rounds > 1


@pytest.mark.parametrize("crop", [False, True], ids=["no crop between", "crop between"])
def test_bursts_past_the_window_by_hand(crop: bool) -> None:
    """transformers #48280: a layer that keeps its past returns more than the mask covers."""
    model, cache, reference, dense = both("gemma3")
    ids = prompt(100)
    cache.activate_past_recording()
    first = 0
    for rows in (WINDOW - 6, 9, 12, 5, 20):
        piece = ids[:, first : first + rows]
        want = forward(reference, piece, dense)
        got = forward(model, piece, cache)
        assert_close(got, want)
        if crop:
            cache.crop(0)
        first += rows


def test_beams_over_sliding_and_full_layers() -> None:
    """transformers #46629, #37873: hybrids fail with drafts or beams."""
    model, cache, _, _ = both("gemma3")
    ids = prompt(WINDOW - 4, 2)
    options = {"num_beams": 3, "num_return_sequences": 2}
    want = dense_answer("gemma3", ids.repeat(1, 1), 10, **options)
    assert torch.equal(generate(model, ids, cache, tokens=10, **options), want)
    assert cache.layers[0].keys.shape[2] < WINDOW
    assert cache.stats().native_layers == 1


def test_recurrent_state_is_never_left_behind_by_a_crop() -> None:
    """transformers #49036: `crop` leaves recurrent state as it was."""
    model, cache, reference, dense = both("qwen3_next")
    forward(model, prompt(40), cache)
    forward(reference, prompt(40), dense)
    with pytest.raises(
        (RuntimeError, ValueError, NotImplementedError), match=r"(?i)crop|recurrent"
    ):
        cache.crop(-3)
    assert cache.get_seq_length() == 40
    for token in prompt(4, seed=3).split(1, 1):
        assert_close(forward(model, token, cache), forward(reference, token, dense))


def test_recurrent_layers_refuse_drafts() -> None:
    """transformers #49036: rejected drafts would stay in the recurrent state."""
    model, cache, _, _ = both("qwen3_next")
    with pytest.raises(ValueError, match=r"(?i)assisted generation"):
        generate(model, repetitive(40), cache, tokens=8, prompt_lookup_num_tokens=4)
    cache.reset()
    got = generate(model, prompt(40), cache, tokens=4)
    assert torch.equal(got, dense_answer("qwen3_next", prompt(40), 4))


def test_layers_without_their_own_store_are_skipped() -> None:
    """transformers #46748: the "next layer" of an offloaded cache need not cache K and V."""
    model = build_model(
        "Qwen3Next",
        {
            "num_hidden_layers": 5,
            "layer_types": [
                *("linear_attention", "full_attention", "linear_attention"),
                *("linear_attention", "full_attention"),
            ],
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"shared_expert_intermediate_size": 32, "linear_num_key_heads": 2},
            **{"linear_num_value_heads": 4, "linear_key_head_dim": 16},
            "linear_value_head_dim": 16,
        },
    )
    ids = prompt(90)
    want = generate(model, ids, dense_cache(model), tokens=5)
    cache = OasisCache(model, **FULL)
    assert torch.equal(generate(model, ids, cache, tokens=5), want)
    stats = cache.stats()
    assert (stats.sparse_layers, stats.native_layers) == (2, 3)
    assert cache.get_seq_length() == ids.shape[1] + 4


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_and_values(kind: str) -> None:
    """transformers #46748: the last layers attend to the K and V of an earlier one."""
    if kind not in tiny.model_types():
        pytest.skip(f"this Transformers has no {kind}")
    config = tiny.tiny_config(kind)
    assert config.num_kv_shared_layers == 2
    model = tiny.tiny_model(config, tiny.class_name(kind), "oasis")
    model.generation_config.eos_token_id = None
    reference = tiny.tiny_model(config, tiny.class_name(kind), "sdpa")
    cache, dense, ids = OasisCache(model, **FULL), dense_cache(reference), prompt(90)
    for rows in (60, 1, 1, 20, 1):
        piece, ids = ids[:, :rows], ids[:, rows:]
        assert_close(forward(model, piece, cache), forward(reference, piece, dense), rounding=512)


# ---- crop, lengths, batch operations -------------------------------------------------------------


@pytest.mark.parametrize("index", ["minmax", "keys2bit", "mean"])
def test_summary_of_a_block_reopened_by_a_crop(index: str) -> None:
    """transformers #30312, #45745: a crop inside a block, whose summary must be of what is left."""
    options = {"budget": 64, "recent_tokens": 0, "index": index}
    driver, fresh = Driver(**options), Driver(**options)
    old = random_qkv(torch.Generator().manual_seed(1), 1, 150)
    # The removed tokens are larger than all others: their bounds would show.
    for tensor in old:
        tensor[:, :, 70:] *= 5
    new = random_qkv(torch.Generator().manual_seed(2), 1, 90)
    driver.feed(*old)
    driver.cache.crop(-80)
    driver.seen = driver.seen[:, :70]
    assert driver.layer.parts.frontier.committed.tolist() == [64]
    fresh.feed(*(tensor[:, :, :70] for tensor in old))
    for target in (driver, fresh):
        target.feed(*new)
        target.feed(*random_qkv(torch.Generator().manual_seed(3), 1, 1))
    ours, wanted = driver.layer, fresh.layer
    assert (
        torch.equal(ours.parts.frontier.committed, wanted.parts.frontier.committed)
        and ours.parts.frontier.committed.item() >= 128
    )
    groups = ours.parts.frontier.committed.item() // ours.parts.geometry.group
    for name, array in ours.parts.index.arrays.items():
        assert torch.equal(array[:, :, :groups], wanted.parts.index.arrays[name][:, :, :groups]), (
            name
        )
    query = random_qkv(torch.Generator().manual_seed(4), 1, 1)
    assert torch.equal(driver.feed(*query)[0], fresh.feed(*query)[0])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_crop_across_a_block_boundary(kind: str) -> None:
    """transformers #30312, #45745: read on from inside an earlier block, as if never read past."""
    model, cache, reference, dense = both(kind, recent_tokens=0)
    if kind == "gemma3":
        cache.activate_past_recording()
    forward(model, prompt(150), cache)
    cache.crop(-29)
    for piece in (prompt(121)[:, :121], prompt(1, seed=3), prompt(20, seed=4), prompt(1, seed=6)):
        want = forward(reference, piece, dense)
        if piece.shape[1] == 121:
            continue
        assert_close(forward(model, piece, cache), want)
        cache.crop(0)
    assert cache.get_seq_length() == 143


def test_batched_drafts_are_refused_by_name() -> None:
    """transformers #32165, #29769, #42655: the stock loop verifies one sequence at a time."""
    model, cache, _, _ = both("llama")
    ids = repetitive(40).repeat(2, 1)
    with pytest.raises(ValueError, match=r"batch_size = 1"):
        generate(model, ids, cache, tokens=4, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match=r"batch_size = 1"):
        generate(model, ids, cache, tokens=4, assistant_model=draft_model("llama", "good"))
    cache.reset()
    got = generate(model, ids, cache, tokens=4)
    assert torch.equal(got, dense_answer("llama", ids, 4))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_masks_cover_the_logical_length(kind: str) -> None:
    """transformers #35168: lengths of layers that hold less than was given break the mask."""
    model = tiny_model(kind)
    cache = OasisCache(model, budget=16, head_room=1.0, sink_tokens=0, recent_tokens=0)
    forward(model, prompt(150), cache)
    forward(model, prompt(1), cache)
    assert cache.get_seq_length() == 151
    layer = cache.offloaded[0]
    assert layer.parts.geometry.slots * 16 + layer.parts.tail.places < 151
    for rows in (1, 7):
        assert cache.get_mask_sizes(rows, cache.layers.index(layer)) == (151 + rows, 0)
    assert layer.get_max_length() == -1 and not layer.is_sliding


OPERATIONS: dict[str, Callable[[Any], None]] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
}
AFTER = {"reorder": [2, 0, 0], "select": [2, 1], "repeat": [0, 0, 1, 1, 2, 2]}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_batch_operation_that_forgets_a_part(kind: str, operation: str) -> None:
    """transformers #45510, #48700, #46612: half of a cache ignored by reorder, crop or select."""
    model, cache, reference, dense = both(kind, dense_layers=(0,) if kind == "llama" else ())
    ids, mask = left_padded([0, 30, 55], 140)
    for target, held in ((model, cache), (reference, dense)):
        if kind == "llama":
            held.activate_past_recording()
        forward(target, ids, held, mask)
        if kind == "llama":
            held.crop(-20)
        OPERATIONS[operation](held)
    rows = AFTER[operation]
    mask = mask[rows, : cache.get_seq_length()]
    for step in range(3):
        token = prompt(1, len(rows), seed=step)
        mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)
        got = forward(model, token, cache, mask)
        assert_close(got, forward(reference, token, dense, mask))
    batched = {
        name: tensor.shape[0]
        for name, tensor in tensors_of(cache.offloaded).items()
        if tensor.ndim > 2
    }
    assert batched and set(batched.values()) == {len(rows)}, batched


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "mistral"])
def test_reorder_skipped_in_beam_search(kind: str) -> None:
    """transformers #46612: beams that keep the history of another beam."""
    model, cache, _, _ = both(kind)
    ids, mask = left_padded([0, 25], 70)
    options = {"attention_mask": mask, "num_beams": 3}
    want = dense_answer(kind, ids, 8, **options)
    assert torch.equal(generate(model, ids, cache, tokens=8, **options), want)


# ---- padding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["minmax", "keys2bit", "oracle"])
def test_padding_in_a_summary(index: str) -> None:
    """kvpress #25, transformers #45938: padding pooled into blocks, or ignored beyond one row."""
    model = tiny_model("llama")
    options = {"budget": 32, "recent_tokens": 0, "sink_tokens": 0, "index": index}
    ids, mask = left_padded([0, 37], 150)
    batch, alone = OasisCache(model, **options), OasisCache(model, **options)
    forward(model, ids, batch, mask)
    forward(model, ids[1:, 37:], alone)
    assert batch.layers[0].parts.frontier.lengths.tolist() == [150, 113]
    for name, array in alone.layers[0].parts.index.arrays.items():
        groups = (
            alone.layers[0].parts.frontier.committed.item() // alone.layers[0].parts.geometry.group
        )
        assert groups > 0
        # The same keys up to rounding: two-bit codes may fall on either side.
        if array.is_floating_point():
            assert_close(
                batch.layers[0].parts.index.arrays[name][1:, :, :groups], array[:, :, :groups]
            )
    for step in range(3):
        token = prompt(1, 2, seed=step)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        got = forward(model, token, batch, mask)
        assert_close(got[1:], forward(model, token[1:], alone))


# ---- ways to call --------------------------------------------------------------------------------


def test_use_without_a_pipeline_object() -> None:
    """kvpress #34: plain `generate`, and a loop of plain calls, say the same."""
    model = tiny_model("llama")
    options = {"budget": 48, "recent_tokens": 8, "index": "minmax"}
    ids = prompt(120)
    said = generate(model, ids, OasisCache(model, **options), tokens=6)
    cache, token, by_hand = OasisCache(model, **options), ids, []
    for _ in range(6):
        token = forward(model, token, cache)[:, -1:].argmax(-1)
        by_hand.append(token)
    assert torch.equal(said, torch.cat(by_hand, 1))


def test_two_caches_on_one_model() -> None:
    """transformers #47731: caches of one model, used in turn, know nothing of each other."""
    model, first, reference, _ = both("gemma3")
    second = OasisCache(model, **FULL, index="minmax", prefill_chunk_size=30)
    caches = [(first, dense_cache(reference)), (second, dense_cache(reference))]
    for step, rows in enumerate((70, 1, 1, 40, 1)):
        for number, (cache, dense) in enumerate(caches):
            piece = prompt(rows + number * (rows > 1), seed=10 * step + number)
            want = forward(reference, piece, dense, logits_to_keep=1)
            assert_close(forward(model, piece, cache, logits_to_keep=1), want)
    assert first.get_seq_length() == second.get_seq_length() - 2


class _BrokeOff(Exception):
    """Stands for running out of memory, or for an interrupt."""


@pytest.mark.parametrize("rows", [1, 30], ids=["decoding", "prompt"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("place", ["before the layer", "before its attention"])
def test_forward_that_broke_off(kind: str, rows: int, place: str) -> None:
    """ShadowKV #20, vllm #52735: an error half-way leaves some layers ahead of others."""
    model, cache, reference, dense = both(kind)
    other = OasisCache(model, **FULL)
    forward(model, prompt(60), cache)
    forward(reference, prompt(60), dense)
    layer = model.model.layers[1]

    def fail(*args: Any) -> None:
        raise _BrokeOff

    if place == "before the layer":
        handle = layer.register_forward_pre_hook(fail)
    else:
        handle = layer.self_attn.o_proj.register_forward_pre_hook(fail)
    try:
        for _ in range(2):
            with pytest.raises(_BrokeOff):
                forward(model, prompt(rows, seed=8), cache)
    finally:
        handle.remove()
    assert cache.get_seq_length() == 60
    got = generate(model, prompt(30), other, tokens=3)
    assert torch.equal(got, dense_answer(kind, prompt(30), 3))
    for piece in (prompt(rows, seed=3), prompt(1, seed=4), prompt(1, seed=5)):
        assert_close(forward(model, piece, cache), forward(reference, piece, dense))


def test_cache_that_dies_while_another_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers #47731: leaving takes hooks off the model, which torch may be walking then.

    An old cache is often freed by a collection, thus at any time: here while a failed forward of
    another cache is undone.
    """
    model, cache, _, _ = both("llama")
    forward(model, prompt(20), cache)
    hooks = (model._forward_pre_hooks, model._forward_hooks)
    gc.collect()
    before = [len(held) for held in hooks]
    undo = OasisCache.roll_back
    for _ in range(3):
        old = OasisCache(model, **FULL)
        old.itself = old
    del old
    left: list[int] = []

    def collect_then_undo(self: OasisCache, *args: Any) -> None:
        left.append(gc.collect())
        undo(self, *args)

    monkeypatch.setattr(OasisCache, "roll_back", collect_then_undo)
    with pytest.raises(ValueError, match="batch size: got 2"):
        forward(model, prompt(1, 2), cache)
    assert len(left) == 1
    got = forward(model, prompt(1, seed=3), cache)
    assert [len(held) for held in hooks] == before
    other = OasisCache(model, **FULL)
    forward(model, prompt(20), other)
    assert torch.equal(got, forward(model, prompt(1, seed=3), other))


def test_cache_that_dies_in_the_hook_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers #47731: a hook removed while torch calls the others."""
    model, cache, reference, dense = both("llama", prefill_chunk_size=20)
    old = OasisCache(model, **FULL)
    old.itself = old
    dead = weakref.ref(old)
    del old
    begin = OasisCache.begin

    def collect_then_begin(self: OasisCache, rows: int) -> None:
        gc.collect()
        begin(self, rows)

    monkeypatch.setattr(OasisCache, "begin", collect_then_begin)
    got = forward(model, prompt(50), cache, logits_to_keep=1)
    assert dead() is None
    assert_close(got, forward(reference, prompt(50), dense, logits_to_keep=1))


@pytest.mark.parametrize(("heads", "kv_heads", "k_dim", "v_dim"), [
    (16, 1, 64, 64), (4, 4, 256, 256), (4, 2, 24, 40), (6, 2, 96, 16), (16, 16, 16, 8),
])  # fmt: skip
def test_head_dimensions(heads: int, kv_heads: int, k_dim: int, v_dim: int) -> None:
    """transformers #46960, trl #6268: large dimensions, or unequal ones of K and V."""
    driver, generator = Driver(heads=heads, **FULL), torch.Generator().manual_seed(0)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in (100, 1, 40, 1):
        parts.append(random_qkv(generator, 1, rows, heads, kv_heads, k_dim, v_dim))
        got = driver.feed(*parts[-1])[0]
        key, value = (torch.cat([part[n] for part in parts], 2)[0] for n in (1, 2))
        assert_close(got[0], plain_attention(parts[-1][0][0], key, value))


def test_variants_that_differ() -> None:
    """ShadowKV #13: an "accurate" and a "fast" variant give different logits.

    Here there is one class; how many blocks stay resident moves bytes, and no bit of an answer.
    """
    model, answers, fetched = tiny_model("llama"), [], []
    for head_room in (1.0, 1.5, 4.0):
        cache = OasisCache(model, budget=32, recent_tokens=0, index="minmax", head_room=head_room)
        forward(model, prompt(150), cache)
        steps = [forward(model, prompt(1, seed=n), cache) for n in range(6)]
        answers.append(torch.cat(steps))
        fetched.append(cache.stats().fetched_now)
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    assert fetched[0] > fetched[2]


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_cache_kept_alive_after_generate(kind: str) -> None:
    """transformers #47731: memory comes back with the last reference, not with a collection."""
    model = tiny_model(kind)
    hooks = (model._forward_pre_hooks, model._forward_hooks)
    gc.collect()
    before = [len(held) for held in hooks]
    cache = OasisCache(model, **FULL)
    generate(model, prompt(70), cache, tokens=3, prompt_lookup_num_tokens=3)
    assert [len(held) for held in hooks] == [count + 1 for count in before]
    gc.collect()
    layer = cache.offloaded[0]
    parts = [
        cache,
        layer,
        layer.parts.store,
        layer.parts.pool,
        layer.parts.tail,
        layer.parts.index,
        layer.step,
        layer.parts,
    ]
    alive = [weakref.ref(part) for part in parts]
    alive += [weakref.ref(slab) for slab in layer.parts.store.slabs]
    del parts, layer
    gc.disable()
    try:
        del cache
        left = [type(part()).__name__ for part in alive if part() is not None]
    finally:
        gc.enable()
    assert not left
    assert [len(held) for held in hooks] == before


def test_growth_copies_the_history() -> None:
    """transformers #25930, #30536: growing by `torch.cat` doubles the peak."""
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    forward(model, prompt(60), cache)
    store = cache.offloaded[0].parts.store
    first = [slab.data_ptr() for slab in store.slabs]
    for number in range(3):
        forward(model, prompt(60, seed=number), cache)
    grown = [slab.data_ptr() for slab in store.slabs]
    assert len(grown) > len(first) and grown[: len(first)] == first
    assert store.nbytes < 2 * 240 * cache.offloaded[0].parts.geometry.token_bytes


def test_host_memory_checked_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """ShadowKV #20: 180 GB are pinned, and the failure looks like one of the GPU."""
    taken: list[tuple[int, ...]] = []
    take = PinnedStore._zeros

    def watch(self: PinnedStore, shape: tuple[int, ...]) -> Tensor:
        taken.append(shape)
        return take(self, shape)

    monkeypatch.setattr(PinnedStore, "_zeros", watch)
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    # 192 tokens in three slabs, each with a spill block, 192 resident ones in 256 places, and their
    # index, which are on the host too here; enough for one of the two layers.
    token = 2 * (16 + 16) * 4
    one_layer = (3 * (64 + 16) + (256 + 16)) * token + 7 * 2 * (32 * 4 + 2 * 16 * 4)
    monkeypatch.setattr(limits, "available_bytes", lambda: int(1.5 * one_layer))
    with pytest.raises(HostMemoryError, match=r"needed .* 2 layers, .* available; use a shorter"):
        forward(model, prompt(180), cache)
    assert not taken
    monkeypatch.setattr(limits, "available_bytes", lambda: 2 * one_layer)
    forward(model, prompt(180), cache)
    assert len(taken) == 6


def test_draft_with_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang #23153: the host pool is allocated for the target and again for the draft."""
    built: list[int] = []
    build = PinnedStore.__init__

    def watch(self: PinnedStore, *args: Any) -> None:
        built.append(1)
        build(self, *args)

    monkeypatch.setattr(PinnedStore, "__init__", watch)
    model, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    assert draft.config._attn_implementation == "oasis"
    cache = OasisCache(model, **FULL)
    ids = prompt(70)
    got = generate(model, ids, cache, tokens=5, assistant_model=draft, num_assistant_tokens=3)
    assert torch.equal(got, dense_answer("llama", ids, 5))
    assert len(built) == len(cache.layers) == 2


def test_cache_that_claims_to_compile() -> None:
    """transformers #35164: an offloaded cache cannot be compiled, and must not say it can."""
    cache = OasisCache(tiny_model("llama"))
    assert not cache.is_compileable


# ---- what the stats say --------------------------------------------------------------------------


def test_sparsity_that_never_engaged_goes_unnoticed() -> None:
    """ShadowKV #4: does it help at all? The stats say so before a user measures it."""
    model = tiny_model("llama")
    cache = OasisCache(model, budget=2048)
    assert cache.stats().note == "the cache is empty"
    forward(model, prompt(40), cache)
    assert "no sparse step yet" in cache.stats().note
    forward(model, prompt(1), cache)
    assert "sparsity never engaged" in cache.stats().note
    assert "a plain DynamicCache would do" in str(cache.stats())
    small = OasisCache(model, budget=16, head_room=1.0, sink_tokens=0, recent_tokens=0, max_rows=1)
    forward(model, prompt(400), small)
    forward(model, prompt(1), small)
    assert "of the full KV" in small.stats().note


@pytest.mark.parametrize("quality", ["good", "bad"])
def test_drafts_that_do_not_pay_go_unnoticed(quality: str) -> None:
    """MagicDec #7, transformers #36337: speculation slower than none, and nothing says why."""
    model, cache, _, _ = both("llama")
    ids = prompt(60)
    draft = draft_model("llama", quality)
    generate(model, ids, cache, tokens=9, assistant_model=draft)
    stats = cache.stats()
    rate = stats.accepted / stats.drafted
    assert stats.rounds > 0 and (rate == 1 if quality == "good" else rate < 0.3)
    assert f"{stats.accepted}/{stats.drafted} accepted ({rate:.0%})" in str(stats)


def test_rejected_drafts_in_the_working_set() -> None:
    """sglang #22411: what rejected drafts brought in crowds out what is needed.

    The choices for drafts bring blocks in; once they are taken back, no answer depends on that.
    """
    drivers = [Driver(budget=32, recent_tokens=0, index="minmax") for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    start = random_qkv(generator, 1, 140)
    for driver in drivers:
        driver.cache.activate_past_recording()
        driver.feed(*start)
        driver.cache.crop(0)
    for _ in range(5):
        token, drafts = (random_qkv(generator, 1, rows) for rows in (1, 5))
        got = []
        for driver, with_drafts in zip(drivers, (False, True), strict=True):
            if with_drafts:
                driver.feed(*(torch.cat(parts, 2) for parts in zip(token, drafts, strict=True)))
                driver.cache.crop(-6)
                driver.seen = driver.seen[:, :-6]
            got.append(driver.feed(*token)[0])
            driver.cache.crop(0)
        assert torch.equal(*got)
    plain, drafted = (driver.cache.stats() for driver in drivers)
    assert (plain.accepted, plain.drafted) == (0, 0)
    assert (drafted.accepted, drafted.drafted) == (0, 25)


def test_refusal_leaves_other_caches_alone() -> None:
    """kvpress #104, transformers #34096: a model that cannot be served fails alone, by name."""
    config = tiny.tiny_config("deepseek_v3")
    config._attn_implementation = "oasis"
    with pytest.raises(OasisUnsupportedError, match="deepseek_v3"):
        OasisCache(config)
    model, cache, _, _ = both("llama")
    assert torch.equal(
        generate(model, prompt(30), cache, tokens=3), dense_answer("llama", prompt(30), 3)
    )
