"""A budget that covers the context gives Transformers' own tokens, in every way to generate."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import (
    FEEDS_AGAIN,
    FULL,
    MODELS,
    NEW_TOKENS,
    PROMPT,
    WINDOW,
    assert_close,
    dense_cache,
    draft_model,
    forward,
    generate,
    left_padded,
    prompt,
    tiny_model,
)
from torch import Tensor

from oasis_hf import OasisCache, OasisUnsupportedError

pytestmark = pytest.mark.usefixtures("small_slabs")

POLICIES: list[dict[str, Any]] = [
    {"index": "keys2bit", "on_miss": "fetch"},
    {"index": "minmax", "on_miss": "fetch"},
    {"index": "keys2bit", "on_miss": "skip"},
    {"index": "minmax", "on_miss": "skip"},
    {"index": "keys2bit", "on_miss": 0.01},
]
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20}

PLAIN_MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": SAMPLED,
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, **SAMPLED},
    "several returned": {"num_return_sequences": 2, **SAMPLED},
    "prefill chunks": {"prefill_chunk_size": 33},
}
DRAFT_MODES: dict[str, dict[str, Any]] = {
    "good draft": {"draft": "good"},
    "fair draft": {"draft": "fair"},
    "bad draft": {"draft": "bad"},
    "fair draft, sampling": {"draft": "fair", **SAMPLED},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "long prompt lookup": {"prompt_lookup_num_tokens": 40, "max_matching_ngram_size": 1},
    "early exit": {"assistant_early_exit": 1},
}
MODES = PLAIN_MODES | DRAFT_MODES


def options_of(kind: str, mode: str) -> dict[str, Any]:
    """Arguments of `generate` for a mode."""
    options = dict(MODES[mode])
    quality = options.pop("draft", None)
    if quality is not None:
        options["assistant_model"] = draft_model(kind, quality)
    return options


@functools.cache
def dense_answer(kind: str, mode: str) -> Tensor:
    """What the model says with Transformers' cache; greedy drafts must not change that."""
    if mode in DRAFT_MODES and "do_sample" not in MODES[mode]:
        mode = "greedy"
    model = tiny_model(kind, "sdpa")
    return generate(model, prompt(), dense_cache(model), **options_of(kind, mode))


CROSSED = ("greedy", "beams", "prefill chunks", "fair draft", "prompt lookup")


def cases() -> list[Any]:
    """Every model and mode with one policy, taken in turn; every policy for Llama's main modes."""
    result = []
    for number, kind in enumerate(MODELS):
        modes = PLAIN_MODES if kind == "qwen3_next" else MODES
        for place, mode in enumerate(modes):
            # Early exit is Transformers' own code for Llama's way of looping over layers.
            if mode == "early exit" and kind != "llama":
                continue
            crossed = kind == "llama" and mode in CROSSED
            for policy in POLICIES if crossed else [POLICIES[(number + place) % len(POLICIES)]]:
                name = f"{kind}-{mode}-{policy['index']}-{policy['on_miss']}"
                result.append(pytest.param(kind, mode, policy, id=name))
    return result


@pytest.mark.parametrize(("kind", "mode", "policy"), cases())
def test_full_budget_is_dense(kind: str, mode: str, policy: dict[str, Any]) -> None:
    model = tiny_model(kind)
    cache = OasisCache(model, **FULL, **policy)
    got = generate(model, prompt(), cache, **options_of(kind, mode))
    assert torch.equal(got, dense_answer(kind, mode))
    stats = cache.stats()
    assert stats.steps > 0
    if mode in DRAFT_MODES:
        assert stats.drafted > 0
        if mode == "good draft" and kind != "gemma3":
            assert stats.accepted == stats.drafted
        elif mode != "early exit":
            assert stats.accepted < stats.drafted


@pytest.mark.parametrize("kind", MODELS)
def test_the_comparison_means_something(kind: str) -> None:
    """A working set of one block gives other tokens, and the dense tokens vary."""
    model = tiny_model(kind)
    cache = OasisCache(model, budget=16, recent_tokens=0, sink_tokens=0)
    sparse, dense = generate(model, prompt(), cache), dense_answer(kind, "greedy")
    assert dense.unique().numel() > 5
    assert (sparse == dense).float().mean() < 0.5


def test_a_group_leaves_the_tail_while_generating() -> None:
    """The prompts here are long enough for the move to happen between two steps."""
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    forward(model, prompt(), cache)
    before = cache.layers[0].parts.frontier.committed.clone()
    for token in prompt(NEW_TOKENS, seed=8).T:
        forward(model, token[None], cache)
    assert (before, cache.layers[0].parts.frontier.committed) == (
        torch.tensor([160]),
        torch.tensor([192]),
    )


@pytest.mark.parametrize("implementation", ["dynamic", "static", "none"])
def test_other_caches_see_plain_attention(implementation: str) -> None:
    """A model loaded with attention "oasis" and another cache behaves as with sdpa."""
    model = tiny_model("llama")
    cache = dense_cache(model) if implementation == "dynamic" else None
    options = {
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "none": {"use_cache": False},
    }[implementation]
    assert torch.equal(generate(model, prompt(), cache, **options), dense_answer("llama", "greedy"))


def generate_or_refuse(
    kind: str, mode: str, held: int, *args: Any, **options: Any
) -> Tensor | None:
    """As `generate`, but None where Transformers feeds tokens again that cannot be taken back.

    Sliding and recurrent layers cannot go back; there the cache must say so, and what to do.
    """
    stuck = (kind == "gemma3" and held >= WINDOW) or kind == "qwen3_next"
    if not (FEEDS_AGAIN and held and mode == "prefill chunks" and stuck):
        return generate(*args, **options)
    with pytest.raises(OasisUnsupportedError, match=r"OasisCache\(model, prefill_chunk_size"):
        generate(*args, **options)
    return None


PREFILLED = {
    "greedy": {},
    "fair draft": {"draft": "fair"},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "prefill chunks": {"prefill_chunk_size": 33},
}


@pytest.mark.parametrize("held", [1, 32, 128, 179])
@pytest.mark.parametrize("mode", PREFILLED)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_prefilled_cache(kind: str, mode: str, held: int) -> None:
    """`model(...)` reads part of the prompt, `generate` gets all of it."""
    model = tiny_model(kind)
    cache = OasisCache(model, **FULL)
    forward(model, prompt()[:, :held], cache, logits_to_keep=1)
    got = generate_or_refuse(kind, mode, held, model, prompt(), cache, **options_of(kind, mode))
    assert got is None or torch.equal(got, dense_answer(kind, "greedy"))


@pytest.mark.parametrize("mode", ["fair draft", "prompt lookup"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_prefilled_with_the_whole_prompt_under_drafts(kind: str, mode: str) -> None:
    """The last tokens are read again, because their logits are asked for."""
    model = tiny_model(kind)
    cache = OasisCache(model, **FULL)
    forward(model, prompt(), cache, logits_to_keep=1)
    got = generate(model, prompt(), cache, **options_of(kind, mode))
    assert torch.equal(got, dense_answer(kind, "greedy"))


@pytest.mark.parametrize("held", [0, 70], ids=["empty", "prefilled"])
@pytest.mark.parametrize("mode", PREFILLED)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_own_prefill_chunks(kind: str, mode: str, held: int) -> None:
    """`OasisCache(prefill_chunk_size=...)` cuts prompts, under drafts too."""
    model = tiny_model(kind)
    cache = OasisCache(model, **FULL, prefill_chunk_size=50)
    if held:
        forward(model, prompt()[:, :held], cache)
    rows: list[int] = []
    watch = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        got = generate_or_refuse(kind, mode, held, model, prompt(), cache, **options_of(kind, mode))
    finally:
        watch.remove()
    if got is None:
        return
    assert torch.equal(got, dense_answer(kind, "greedy"))
    assert max(rows) <= 50 and sum(rows) >= PROMPT - held


@pytest.mark.parametrize("mode", ["greedy", "fair draft", "prompt lookup", "prefill chunks"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_several_turns_on_one_cache(kind: str, mode: str) -> None:
    """Each turn continues the conversation so far; the cache reads only what is new."""
    if kind == "qwen3_next" and mode not in ("greedy", "prefill chunks"):
        pytest.skip("Transformers refuses drafts for models with recurrent state")
    model, reference = tiny_model(kind), tiny_model(kind, "sdpa")
    cache, said = OasisCache(model, **FULL), prompt(90)
    for turn in range(3):
        said = torch.cat([said, prompt(20 + 11 * turn, seed=turn)], 1)
        want = generate(reference, said, dense_cache(reference), tokens=12)
        options = {"tokens": 12, **options_of(kind, mode)}
        got = generate_or_refuse(kind, mode, cache.get_seq_length(), model, said, cache, **options)
        if got is None:
            return
        assert torch.equal(got, want), f"turn {turn}"
        said = torch.cat([said, got], 1)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_turns_of_different_modes(kind: str) -> None:
    """With drafts, then without, with others, and without again."""
    model, reference = tiny_model(kind), tiny_model(kind, "sdpa")
    cache, said = OasisCache(model, **FULL), prompt(90)
    for turn, mode in enumerate(("prompt lookup", "greedy", "fair draft", "sampling")):
        said = torch.cat([said, prompt(20, seed=turn)], 1)
        options = {"tokens": 12, **options_of(kind, mode)}
        plain = options if mode == "sampling" else {"tokens": 12}
        want = generate(reference, said, dense_cache(reference), **plain)
        got = generate(model, said, cache, **options)
        assert torch.equal(got, want), f"turn {turn}"
        said = torch.cat([said, got], 1)


@pytest.mark.parametrize("policy", POLICIES[:3], ids=lambda p: f"{p['index']}-{p['on_miss']}")
@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "prefill chunks"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_left_padded_batch(kind: str, mode: str, policy: dict[str, Any]) -> None:
    model, reference = tiny_model(kind), tiny_model(kind, "sdpa")
    ids, mask = left_padded([0, 37, 130])
    options = {"attention_mask": mask, **options_of(kind, mode)}
    want = generate(reference, ids, dense_cache(reference), tokens=16, **options)
    got = generate(model, ids, OasisCache(model, **FULL, **policy), tokens=16, **options)
    assert torch.equal(got, want)


def test_several_continuations_of_a_prefilled_cache() -> None:
    """Read a prompt once, repeat its row, sample from each."""
    model, reference = tiny_model("llama"), tiny_model("llama", "sdpa")
    answers = []
    for target, cache in (
        (reference, dense_cache(reference)),
        (model, OasisCache(model, **FULL)),
    ):
        forward(target, prompt()[:, :150], cache)
        cache.batch_repeat_interleave(3)
        answers.append(generate(target, prompt().repeat(3, 1), cache, **SAMPLED))
    assert torch.equal(*answers)
    assert len({tuple(row) for row in answers[0].tolist()}) == 3


# ---- hand-written loops: plain calls of the model, no generate -----------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_hand_written_greedy_loop(kind: str) -> None:
    """Calls of different lengths, no masks, all logits: each equals the dense model's."""
    model, reference = tiny_model(kind), tiny_model(kind, "sdpa")
    cache, dense = OasisCache(model, **FULL), dense_cache(reference)
    first = 0
    for rows in (70, 1, 1, 60, 1, 30, 1, 1, 17, 1):
        piece = prompt(200)[:, first : first + rows]
        assert_close(forward(model, piece, cache), forward(reference, piece, dense))
        first += rows
    assert cache.get_seq_length() == first


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_hand_written_padded_loop(kind: str, side: str) -> None:
    """Wherever the padding stands, a row's logits are those of the row alone."""
    model, reference = tiny_model(kind), tiny_model(kind, "sdpa")
    pieces = [prompt(150, 2), *(prompt(1, 2, seed=n) for n in range(10)), prompt(30, 2, seed=20)]
    pieces += [prompt(1, 2, seed=30 + n) for n in range(12)]
    masks = [torch.ones_like(piece) for piece in pieces]
    place = {"left": slice(0, 40), "right": slice(110, 150), "middle": slice(50, 90)}[side]
    masks[0][1, place] = 0
    if side != "left":
        masks[3][1] = masks[7][0] = 0
        masks[11][0, 20:] = 0
    cache, got, seen = OasisCache(model, **FULL), [], torch.zeros(2, 0, dtype=torch.long)
    for piece, mask in zip(pieces, masks, strict=True):
        seen = torch.cat([seen, mask], 1)
        got.append(forward(model, piece, cache, seen))
    ids, logits = torch.cat(pieces, 1), torch.cat(got, 1)
    for row in range(2):
        real = seen[row].bool()
        want = forward(reference, ids[row : row + 1, real], dense_cache(reference))
        assert_close(logits[row, real], want[0])


def speculate(kind: str, burst: int, cache: Any) -> list[int]:
    """A speculative loop as a user would write it: greedy, one sequence.

    The drafts are the right tokens for a while, then random ones.
    """
    model, answer = tiny_model(kind), dense_answer(kind, "greedy")
    cache.activate_past_recording()
    ids, rounds = prompt(), 0
    forward(model, ids[:, :-1], cache)
    cache.crop(0)
    while ids.shape[1] < PROMPT + NEW_TOKENS:
        done, good = ids.shape[1] - PROMPT, (0, 2, burst)[rounds % 3]
        guess = prompt(burst, seed=rounds)
        known = answer[:, done : done + min(good, burst)]
        guess[:, : known.shape[1]] = known
        choice = forward(model, torch.cat([ids[:, -1:], guess], 1), cache).argmax(-1)
        right = int((choice[0, :-1] == guess[0]).int().cumprod(0).sum())
        cache.crop(right - burst)
        ids = torch.cat([ids, choice[:, : right + 1]], 1)
        assert cache.get_seq_length() == ids.shape[1] - 1
        rounds += 1
    return ids[0, PROMPT : PROMPT + NEW_TOKENS].tolist()


@pytest.mark.parametrize(
    ("kind", "burst"), [("llama", 1), ("llama", 40), ("gemma3", 5), ("gemma3", 70)]
)
def test_hand_written_speculative_loop(kind: str, burst: int) -> None:
    """`activate_past_recording` and `crop` are all that a loop of one's own needs.

    Bursts of 40 and 70 are more rows than one sparse step takes, and cross blocks, a group and
    Gemma's window.
    """
    model = tiny_model(kind)
    cache = OasisCache(model, **FULL)
    assert speculate(kind, burst, cache) == dense_answer(kind, "greedy")[0].tolist()
    assert (cache.stats().rounds > 0) == (burst < 32)


def test_assistant_may_use_the_same_attention() -> None:
    """A draft that also has attention "oasis" keeps Transformers' cache."""
    model, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    cache = OasisCache(model, **FULL)
    got = generate(model, prompt(), cache, assistant_model=draft, num_assistant_tokens=4)
    assert torch.equal(got, dense_answer("llama", "greedy"))
