"""Batched speculation: the acceptance rule, lookup, the policy, what a cache keeps, bad input."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from eval_helpers import character_tokenizer
from helpers import (
    FULL,
    MODELS,
    SMALL,
    Driver,
    build_model,
    dense_cache,
    draft_model,
    generate,
    left_padded,
    prompt,
    tensors_of,
    tiny_model,
)
from tokenizers import decoders
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache

import oasis_hf
from oasis_hf import OasisCache, OasisUnsupportedError
from oasis_hf.facts.compat import StepwiseCache, cache_kwarg
from oasis_hf.generation import acceptance, front
from oasis_hf.generation.acceptance import Drafts, choose
from oasis_hf.generation.drafting import PromptLookup
from oasis_hf.generation.speculation import Speculation
from oasis_hf.generation.text import Text
from oasis_hf.graphs.capture import PLAIN

SURE = 5.0
"""Standard deviations of chi-square beyond which counts do not fit a distribution."""


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """How far counts are from probabilities, in standard deviations of chi-square.

    Cells that are expected fewer than five times are put together.
    """
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    seen = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if wanted[-1] < 1:
        assert seen[-1] < 10
        seen, wanted = seen[:-1], wanted[:-1]
    free = len(wanted) - 1
    return float((((seen - wanted) ** 2 / wanted).sum() - free) / (2 * free) ** 0.5)


# ---- the rule ------------------------------------------------------------------------------------

TOKENS = 6
ROWS = 60_000


def random_scores(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = 1.5 * torch.randn(*shape, TOKENS, generator=generator)
    # Some tokens are out of the question, as behind top-k.
    return torch.where(torch.rand(scores.shape, generator=generator) < 0.2, -torch.inf, scores)


def sample_two(kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two drafted tokens and what came of them: counts of pairs and their exact probabilities.

    The model's next distribution depends on the token before, as in a text.
    """
    torch.manual_seed(seed)
    p_first, p_second = random_scores(seed, 1), random_scores(seed + 1, TOKENS)
    q_first, q_second = random_scores(seed + 2, 1).softmax(-1), random_scores(seed + 3, TOKENS)
    q_second = q_second.softmax(-1)
    if kind == "one-hot":
        drafts = torch.stack([torch.full((ROWS,), 2), torch.full((ROWS,), 4)], 1)
        q = None
    else:
        first = torch.multinomial(q_first.expand(ROWS, -1), 1)
        drafts = torch.cat([first, torch.multinomial(q_second[first[:, 0]], 1)], 1)
        q = torch.stack([q_first.expand(ROWS, -1), q_second[first[:, 0]]], 1)
    counts = torch.arange(ROWS) % 3 if kind == "fewer" else torch.full((ROWS,), 2)
    scores = torch.stack(
        [p_first.expand(ROWS, -1), p_second[drafts[:, 0]], torch.zeros(ROWS, TOKENS)], 1
    )
    tokens, accepted = choose(scores, Drafts(drafts, counts, q), sample=True)
    # Where only one token came out, the second is sampled in a round of its own.
    later = torch.multinomial(p_second.softmax(-1)[tokens[:, 0]], 1)[:, 0]
    second = torch.where(accepted > 0, tokens[:, 1], later)
    pairs = torch.bincount(tokens[:, 0] * TOKENS + second, minlength=TOKENS**2)
    exact = p_first.softmax(-1)[0][:, None] * p_second.softmax(-1)
    return pairs, exact.flatten()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["sampled", "one-hot", "fewer"])
def test_samples_are_distributed_as_the_models_own(kind: str, seed: int) -> None:
    assert chi_square(*sample_two(kind, seed)) < SURE


@pytest.mark.parametrize("kind", ["sampled", "one-hot"])
def test_wrong_rules_are_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this ever fails, the test above proves nothing."""
    with monkeypatch.context() as patch:
        # A refused draft is replaced by a sample of p, not of what q left over.
        patch.setattr(acceptance, "_proposal", lambda drafts, number, like: torch.zeros_like(like))
        assert chi_square(*sample_two(kind)) > 2 * SURE
    with monkeypatch.context() as patch:
        # Drafts are accepted with p, not p / q; or always with half a chance.
        patch.setattr(torch, "rand_like", lambda like: torch.full_like(like, 0.5))
        assert chi_square(*sample_two(kind)) > 2 * SURE


def test_greedy_accepts_up_to_the_first_difference() -> None:
    scores = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 1], [3, 1, 4, 1]]), 6).float()
    drafts = Drafts(torch.tensor([[3, 1, 5], [3, 1, 4]]), torch.tensor([3, 1]))
    tokens, accepted = choose(scores, drafts, sample=False)
    assert tokens.tolist() == [[3, 1, 4, 1], [3, 1, 4, 1]] and accepted.tolist() == [2, 1]


# ---- sampling from a model -----------------------------------------------------------------------


class Prefer(LogitsProcessor):
    """Makes tokens that a row holds already likelier, so that lookup finds right drafts."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_add(
            1, input_ids, torch.full_like(scores[:, :1], 2.0).expand_as(input_ids)
        )


WARPERS = {"do_sample": True, "temperature": 1.5, "top_k": 5, "top_p": 0.95}
WARPERS["logits_processor"] = LogitsProcessorList([Prefer()])


@functools.cache
def exact_sequences(length: int = 3) -> tuple[Tensor, dict[tuple[int, ...], float]]:
    """A prompt, and the probability of every continuation, one token at a time."""
    model, ids = tiny_model("llama", "sdpa"), prompt(8).repeat(1, 3)
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, share in texts.items():
            so_far = torch.cat([ids, torch.tensor([text], dtype=torch.long)], 1)
            output = model.generate(
                so_far,
                attention_mask=torch.ones_like(so_far),
                max_new_tokens=1,
                output_scores=True,
                return_dict_in_generate=True,
                **WARPERS,
            )
            p = output.scores[0][0].double().softmax(-1)
            longer |= {(*text, int(t)): share * float(p[t]) for t in p.nonzero()[:, 0]}
        texts = longer
    return ids, texts


@pytest.mark.parametrize("drafts", ["fair", "bad", "lookup", "none"])
def test_sampled_texts_have_the_models_probabilities(drafts: str) -> None:
    ids, exact = exact_sequences()
    assert len(exact) > 40 and max(exact.values()) < 0.3
    model, rows = tiny_model("llama"), 4000
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 2} if drafts == "lookup" else {}
    if drafts in ("fair", "bad"):
        options = {"draft": draft_model("llama", drafts), "num_assistant_tokens": 2}
    torch.manual_seed(3)
    batch = ids.repeat(rows, 1)
    output = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        past_key_values=dense_cache(model),
        custom_generate=oasis_hf.generation.generate,
        max_new_tokens=3,
        return_dict_in_generate=True,
        **WARPERS,
        **options,
    )
    names = {text: number for number, text in enumerate(exact)}
    seen = [names[tuple(row)] for row in output.sequences[:, ids.shape[1] :].tolist()]
    counts = torch.bincount(torch.tensor(seen), minlength=len(names))
    assert chi_square(counts, torch.tensor(list(exact.values()))) < SURE
    assert (output.speculation.accepted > 0) == (drafts not in ("none",))


# ---- prompt lookup -------------------------------------------------------------------------------


def look_up(text: list[int], length: int, ngram: int = 2, pads: int = 0) -> list[int]:
    ids = torch.tensor([text, [9] * len(text)])
    real = torch.ones_like(ids, dtype=torch.bool)
    real[0, :pads] = False
    drafts = PromptLookup(ngram).propose(Text(ids, real, 0), length)
    return drafts.tokens[0, : int(drafts.counts[0])].tolist()


def test_lookup_drafts_what_followed_before() -> None:
    assert look_up([1, 2, 3, 4, 5, 6, 1, 2], 3) == [3, 4, 5]
    assert look_up([1, 2, 3, 4, 5, 6], 3) == [], "nothing was there before"
    assert look_up([7, 2, 3, 4, 1, 2, 5, 6, 0, 1, 2], 2) == [5, 6], "longer matches first"
    assert look_up([1, 2, 3, 4, 1, 2, 8, 9, 1, 2], 2) == [8, 9], "then the newest"
    assert look_up([4, 4, 4, 4, 4, 4], 3) == [4, 4, 4], "but with as many behind as wanted"
    assert look_up([0, 0, 5, 0, 0], 2, pads=2) == [0], "padding is no text"
    assert look_up([3, 1, 2, 1], 4) == [2, 1], "no more than there is"


# ---- the policy ----------------------------------------------------------------------------------


def play(policy: Speculation, rounds: int, accepted: int, draft: float, plain: float) -> list[int]:
    lengths = []
    for _ in range(rounds):
        lengths.append(policy.next_length())
        took = (draft, plain) if lengths[-1] else (0.0, plain)
        right = accepted if lengths[-1] else 0
        policy.record([lengths[-1]], [right], right + 1, 1, *took)
    return lengths


def test_a_fixed_number_stays() -> None:
    assert play(Speculation(4), 200, accepted=0, draft=9.0, plain=1.0) == [4] * 200


def test_drafts_that_do_not_pay_are_left_out() -> None:
    lengths = play(Speculation(4, adaptive=True), 400, accepted=1, draft=1.5, plain=1.0)
    assert lengths[:16] == [4] * 8 + [0] * 8
    assert lengths.count(4) < 60, "only tried now and then"
    assert 4 in lengths[-72:], "and tried again"


def test_drafts_that_pay_are_kept() -> None:
    lengths = play(Speculation(4, adaptive=True), 400, accepted=3, draft=0.5, plain=1.0)
    assert lengths.count(0) < 60


def test_a_policy_follows_a_change() -> None:
    policy = Speculation(4, adaptive=True)
    play(policy, 200, accepted=3, draft=0.5, plain=1.0)
    assert play(policy, 300, accepted=0, draft=0.5, plain=1.0)[-100:].count(4) < 30


def test_one_slow_round_decides_nothing() -> None:
    """Such as the one that captures a graph."""
    policy = Speculation(4, adaptive=True)
    policy.record([4], [3], 4, 1, 0.5, 500.0)
    assert play(policy, 100, accepted=3, draft=0.5, plain=1.0).count(0) < 20


def test_the_report_adds_up() -> None:
    policy = Speculation(4)
    policy.record([4, 4], [1, 2], 5, 2, 0.5, 1.0)
    policy.record([0, 4], [0, 4], 5, 1, 0.25, 1.0)
    did = policy.report()
    assert (did.rounds, did.drafted_rounds, did.tokens) == (2, 2, 10)
    assert did.acceptance == 7 / 12 and did.tokens_per_round == 10 / 3
    assert (did.drafted_by_row, did.accepted_by_row) == ((4, 8), (1, 6))
    assert did.acceptance_by_row == (1 / 4, 6 / 8)
    assert (did.draft_seconds, did.verify_seconds) == (0.75, 2.0)
    policy.start()
    assert policy.report().rounds == 0 and policy.report().acceptance == 0


@pytest.mark.parametrize(
    "options", [{"draft_length": -1}, {"draft_length": 2.5}, {"draft_length": 2, "trial": 0}]
)
def test_a_policy_refuses_numbers_that_make_no_sense(options: dict[str, Any]) -> None:
    name = list(options)[-1]
    with pytest.raises(ValueError, match=f"^{name}: got .* expected a whole number"):
        Speculation(**options)


# ---- what a cache keeps --------------------------------------------------------------------------


def test_rejected_drafts_leave_store_index_and_residents_alone() -> None:
    """After a round of which nothing is kept, all parts but the ring are bit for bit as before."""
    driver = Driver(budget=256, recent_tokens=8, max_rows=8)
    generator = torch.Generator().manual_seed(0)
    driver.feed_random(generator, 3, 150)
    driver.feed_random(generator, 3, 1)
    driver.cache.expect_drafts()
    layer = driver.layer
    # A full budget has every block resident, so queries of drafts want none that is not.
    parts = {
        "store": layer.parts.store,
        "index": layer.parts.index.arrays,
        "pool": layer.parts.pool,
    }
    parts |= {
        "slot": layer.parts.residency.slot_of_block,
        "block": layer.parts.residency.block_of_slot,
    }
    parts |= {
        "lengths": layer.parts.frontier.lengths[None, None],
        "committed": layer.parts.frontier.committed[None, None],
    }
    before = {name: tensor.clone() for name, tensor in tensors_of(parts).items()}
    seen = driver.seen
    driver.feed_random(generator, 3, 8)
    driver.cache.commit(8, torch.tensor([0, 0, 0]))
    after = tensors_of(parts)
    assert before.keys() == after.keys() and len(before) > 6
    for name, tensor in before.items():
        # The last block is the spill, which takes what is not to be written.
        held = slice(-1) if name.startswith(("store", "index")) else slice(None)
        assert torch.equal(after[name][:, :, held], tensor[:, :, held]), name
    assert driver.cache.get_seq_length() == 151
    # And with drafts kept, the same tokens are there as if the others had never been fed.
    other = Driver(budget=256, recent_tokens=8, max_rows=8)
    again = torch.Generator().manual_seed(0)
    other.feed_random(again, 3, 150)
    other.feed_random(again, 3, 1)
    driver.seen = seen
    (q, k, v), _ = driver.feed_random(generator, 3, 8)
    kept = torch.tensor([3, 1, 8])
    driver.cache.commit(8, kept)
    other.feed(q, k, v, torch.arange(8)[None] < kept[:, None])
    lengths = driver.layer.parts.frontier.lengths.tolist()
    assert lengths == [154, 152, 159] == other.layer.parts.frontier.lengths.tolist()
    for a, b in zip(
        driver.layer.history(lengths)[:2], other.layer.history(lengths)[:2], strict=True
    ):
        assert torch.equal(a, b)
    assert driver.cache.ledger.real().sum(1).tolist() == lengths
    assert driver.cache.ledger.real()[:, -1].all(), "newest tokens stand in the last column"


def test_commits_are_counted() -> None:
    driver = Driver(budget=256, max_rows=8)
    generator = torch.Generator().manual_seed(0)
    driver.feed_random(generator, 2, 50)
    driver.cache.expect_drafts()
    driver.feed_random(generator, 2, 5)
    driver.cache.commit(5, torch.tensor([1, 4]))
    stats = driver.cache.stats()
    assert (stats.rounds, stats.drafted, stats.accepted) == (1, 8, 3)


@pytest.mark.parametrize(
    ("rows", "kept", "options", "message"),
    [
        (9, [1, 1], {}, "rows: got 9, expected 1 to 5"),
        (0, [0, 0], {}, "rows: got 0"),
        (3, [1], {}, r"kept: got shape \(1,\)"),
        (3, [4, 1], {}, r"kept: got \[4, 1\], expected 0 to \[3, 3\]"),
        (3, [2, -1], {}, "kept: got"),
        (3, [2, 1], {"offered": torch.tensor([1, 3])}, "kept: got"),
        (3, [2, 1], {"offered": torch.tensor([4, 3])}, "offered: got"),
        (3, [2, 1], {"columns": 6}, "columns: got 6, expected 2 to 5"),
        (3, [2, 1], {"columns": 1}, "columns: got 1, expected 2 to 5"),
    ],
)
def test_a_commit_that_does_not_fit_changes_nothing(
    rows: int, kept: list[int], options: dict[str, Any], message: str
) -> None:
    driver = Driver(budget=64, max_rows=8)
    driver.feed_random(torch.Generator().manual_seed(0), 2, 5)
    with pytest.raises(ValueError, match=message):
        driver.cache.commit(rows, torch.tensor(kept), **options)
    assert (
        driver.layer.parts.frontier.lengths.tolist() == [5, 5]
        and driver.cache.get_seq_length() == 5
    )


# ---- the loop around it --------------------------------------------------------------------------


class Tokens:
    """A streamer that remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.given.append(value.flatten())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_every_token_once() -> None:
    model, streamer = tiny_model("llama"), Tokens()
    cache = OasisCache(model, **FULL)
    options = {"past_key_values": cache, "assistant_model": draft_model("llama", "fair")}
    out = oasis_hf.generation.generate(
        model, prompt(), streamer=streamer, max_new_tokens=20, do_sample=False, **options
    )
    assert torch.equal(torch.cat(streamer.given), out[0]) and streamer.ended == 1
    assert 3 < len(streamer.given) < 21, "a round gives several tokens at once"


def test_logits_and_scores_are_those_of_plain_generation() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama", "sdpa")
    ids, mask = left_padded([0, 37])
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    options |= {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    options |= {"repetition_penalty": 1.3}
    want = reference.generate(ids, past_key_values=dense_cache(reference), **options)
    got = oasis_hf.generation.generate(
        model,
        ids,
        past_key_values=OasisCache(model, **FULL),
        assistant_model=draft_model("llama", "fair"),
        **options,
    )
    for name in ("scores", "logits"):
        ours, theirs = torch.stack(getattr(got, name)), torch.stack(getattr(want, name))
        assert torch.allclose(ours, theirs, atol=1e-3), name


def test_a_failure_in_the_middle_leaves_what_was_read() -> None:
    """A processor that raises loses neither the prompt nor what was committed."""
    model = tiny_model("llama")
    ids, mask = left_padded([0, 37, 130])
    calls = itertools.count()

    def broken(ids: Tensor, scores: Tensor) -> Tensor:
        if next(calls) > 12:
            raise KeyboardInterrupt
        return scores

    cache = OasisCache(model, **FULL)
    options = {"attention_mask": mask, "draft": draft_model("llama", "fair")}
    with pytest.raises(KeyboardInterrupt):
        generate(
            model,
            ids,
            cache,
            custom_generate=oasis_hf.generation.generate,
            logits_processor=[broken],
            **options,
        )
    held = cache.get_seq_length()
    assert held > ids.shape[1], "some rounds should have passed"
    real = cache.ledger.real()
    assert torch.equal(real[:, : ids.shape[1]], mask.bool()), "laid out as the sequences"
    assert torch.equal(cache.layers[0].parts.frontier.lengths, real.sum(1))
    # Back to the prompt, and again.
    cache.crop(ids.shape[1] - 1 - held)
    want = generate(model, ids, OasisCache(model, **FULL), attention_mask=mask)
    got = generate(model, ids, cache, custom_generate=oasis_hf.generation.generate, **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("who", ["model", "draft"])
def test_a_forward_that_breaks_off_leaves_what_was_committed(who: str) -> None:
    """Out of memory, say: the cache's own hook undoes the forward, and the loop the round."""
    model, draft = tiny_model("llama"), draft_model("llama", "fair")
    ids, mask = left_padded([0, 37, 130])
    cache, calls = OasisCache(model, **FULL), itertools.count()

    def broken(*given: Any) -> None:
        if next(calls) > 12:
            raise MemoryError

    module = (model if who == "model" else draft).model.layers[1].mlp
    handle = module.register_forward_hook(broken)
    options = {"attention_mask": mask, "draft": draft}
    options["custom_generate"] = oasis_hf.generation.generate
    try:
        with pytest.raises(MemoryError):
            generate(model, ids, cache, 60, **options)
    finally:
        handle.remove()
    held = cache.get_seq_length()
    real = cache.ledger.real()
    assert held > ids.shape[1] and torch.equal(real[:, : ids.shape[1]], mask.bool())
    for layer in cache.layers:
        assert layer.columns == held and torch.equal(layer.parts.frontier.lengths, real.sum(1))
    cache.crop(ids.shape[1] - 1 - held)
    want = generate(model, ids, OasisCache(model, **FULL), attention_mask=mask)
    assert torch.equal(generate(model, ids, cache, **options), want)


def test_stop_strings_of_the_direct_call() -> None:
    """Transformers does not hand the tokenizer on; the text ends with the string all the same."""
    tokenizer, model = character_tokenizer(), tiny_model("llama")
    # Without spaces between tokens, as stop strings need it.
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    free = generate(model, prompt(), OasisCache(model, **FULL))
    known = [int(t) for t in free[0] if int(t) < len(tokenizer)]
    string = tokenizer.decode(known[3])
    want = model.generate(
        prompt(),
        past_key_values=OasisCache(model, **FULL),
        stop_strings=string,
        tokenizer=tokenizer,
        **options,
    )
    got = oasis_hf.generation.generate(
        model,
        prompt(),
        past_key_values=OasisCache(model, **FULL),
        assistant_model=draft_model("llama", "fair"),
        stop_strings=string,
        tokenizer=tokenizer,
        **options,
    )
    assert want.shape[1] < 180 + 24 and torch.equal(got, want)


def test_every_round_may_be_a_graph() -> None:
    """Graphs replay calls of constant shape with plain arguments; see `StepGraphs`."""
    model, calls = tiny_model("llama"), []
    ids, mask = left_padded([0, 37, 130])
    cache = OasisCache(model, **FULL)

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not args and kwargs.keys() <= set(PLAIN)
        rows = kwargs["input_ids"].shape[1]
        mask, positions = kwargs["attention_mask"], kwargs["position_ids"]
        assert mask.shape == (3, cache.get_seq_length() + rows)
        assert positions.shape == kwargs["input_ids"].shape
        calls.append((rows, kwargs["logits_to_keep"], not cache.describe(rows).dense))

    # Ours runs before the cache's own hook would mark a prompt as such.
    handle = model.register_forward_pre_hook(record, with_kwargs=True, prepend=True)
    try:
        options = {"attention_mask": mask, "draft": draft_model("llama", "fair")}
        options["custom_generate"] = oasis_hf.generation.generate
        generate(model, ids, cache, **options)
    finally:
        handle.remove()
    assert calls[0] == (180, 1, False)
    ends = 1 if calls[-1][0] == 1 else 0
    assert set(calls[1 : len(calls) - ends]) == {(5, 5, True)} and len(calls) > 6
    assert calls[-1][2]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_turn_may_give_the_new_tokens_only(batch: int) -> None:
    """With a mask over everything, as in Transformers; the output begins at the new tokens."""
    model, reference = tiny_model("llama"), tiny_model("llama", "sdpa")
    ids, mask = left_padded([0, 37, 110][:batch], 160)
    call = {"custom_generate": oasis_hf.generation.generate, "prompt_lookup_num_tokens": 4}
    cache, follower = OasisCache(model, **FULL), dense_cache(reference)
    drafts = {"draft": reference, "draft_cache": follower, "num_assistant_tokens": 3}
    said = generate(model, ids, cache, 12, attention_mask=mask, **call)
    # The last token is in no cache yet.
    new = torch.cat([said[:, -1:], prompt(20, batch, seed=9)], 1)
    whole = torch.cat([ids, said, new[:, 1:]], 1)
    seen = torch.cat([mask, mask.new_ones(batch, whole.shape[1] - ids.shape[1])], 1)
    want = generate(reference, whole, dense_cache(reference), 16, attention_mask=seen)
    assert torch.equal(generate(model, new, cache, 16, attention_mask=seen, **call), want)
    # A draft must have followed; here it reads everything in a turn of its own.
    other = OasisCache(model, **FULL)
    del call["prompt_lookup_num_tokens"]
    got = generate(model, whole, other, 16, attention_mask=seen, **call, **drafts)
    assert torch.equal(got, want)
    assert follower.get_seq_length() == other.get_seq_length() == whole.shape[1] + 15


def test_a_long_text_outgrows_the_room_for_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oasis_hf.generation.text.GROWTH", 3)
    model = tiny_model("llama")
    cache, options = OasisCache(model, **FULL), {"draft": draft_model("llama", "fair")}
    want = generate(model, prompt(), OasisCache(model, **FULL))
    got = generate(model, prompt(), cache, custom_generate=oasis_hf.generation.generate, **options)
    assert torch.equal(got, want)


def test_other_names_are_still_missing() -> None:
    """`oasis_hf.generation` is imported when it is asked for."""
    with pytest.raises(AttributeError, match="no attribute 'generations'"):
        _ = oasis_hf.generations  # type: ignore[attr-defined]


# ---- the draft's cache ---------------------------------------------------------------------------


def test_a_drafts_cache_is_bounded_where_its_attention_can_be() -> None:
    model, cache = tiny_model("llama"), OasisCache(tiny_model("llama"), budget=64)
    own = front._draft_cache(model, cache)
    assert isinstance(own, OasisCache) and own.oasis_config.budget == 64
    assert front._draft_cache(model, DynamicCache()).oasis_config.budget == 2048
    assert type(front._draft_cache(draft_model("llama", "good"), cache)) is StepwiseCache


def test_a_bounded_draft_changes_no_token() -> None:
    """What a draft forgets costs acceptance, never a token."""
    model, draft = tiny_model("llama"), build_model(*MODELS["llama"], "oasis")
    ids = {"input_ids": prompt(180, 2), "max_new_tokens": 20, "do_sample": False}
    plain = model.generate(**ids, **{cache_kwarg(model): OasisCache(model, **FULL)})
    found = oasis_hf.generation.generate(
        model,
        **ids,
        past_key_values=OasisCache(model, **FULL),
        draft=draft,
        draft_cache=OasisCache(draft, budget=32),
        return_dict_in_generate=True,
    )
    assert torch.equal(found.sequences, plain)
    # The draft has the model's weights: only what it does not attend to can cost acceptance.
    assert 0 < found.speculation.accepted < found.speculation.drafted


# ---- bad input -----------------------------------------------------------------------------------


def other_vocabulary() -> Any:
    import transformers

    config = transformers.LlamaConfig(**(SMALL | {"vocab_size": 64}))
    return transformers.LlamaForCausalLM(config)


def bad_calls() -> dict[str, tuple[type[Exception], str, Any]]:
    """Error, message, and the arguments that cause it, given the model."""
    draft = functools.partial(draft_model, "llama", "fair")
    return {
        "beams": (ValueError, "num_beams: got 2, expected 1", lambda m: {"num_beams": 2}),
        "vocabulary": (
            ValueError,
            "draft: got a model with 64 tokens in its vocabulary, expected 128",
            lambda m: {"draft": other_vocabulary()},
        ),
        "too long": (
            ValueError,
            "draft length: got 32, expected at most 31.*raise max_rows to 33",
            lambda m: {"draft": draft(), "num_assistant_tokens": 32},
        ),
        "lookup too long": (
            ValueError,
            "draft length: got 40, expected at most 31",
            lambda m: {"prompt_lookup_num_tokens": 40},
        ),
        "two sources": (
            ValueError,
            "prompt_lookup_num_tokens: got 4 together with a draft model",
            lambda m: {"prompt_lookup_num_tokens": 4, "draft": draft()},
        ),
        "policy": (ValueError, "speculation: got int", lambda m: {"speculation": 4}),
        "policy without drafts": (
            ValueError,
            "speculation: got draft_length=4 and nothing to draft with",
            lambda m: {"speculation": Speculation(4)},
        ),
        "right padding": (
            ValueError,
            "attention_mask: row 1 ends with padding, expected left padding",
            lambda m: {"attention_mask": torch.tensor([[1] * 180, [1] * 170 + [0] * 10])},
        ),
        "prefixes": (
            ValueError,
            "prefix_allowed_tokens_fn: got a batch of 2, expected 1",
            lambda m: {"prefix_allowed_tokens_fn": lambda row, ids: [5, 6]},
        ),
        "guidance": (
            ValueError,
            "logits_processor: got UnbatchedClassifierFreeGuidanceLogitsProcessor",
            lambda m: {"guidance_scale": 1.5},
        ),
        "hidden states": (
            ValueError,
            "output_hidden_states: got True, expected False",
            lambda m: {"output_hidden_states": True, "return_dict_in_generate": True},
        ),
        "a cache without its model": (
            ValueError,
            "draft_cache: got a cache without a draft model",
            lambda m: {"draft_cache": DynamicCache()},
        ),
        "a cache that cannot": (
            ValueError,
            "draft_cache: got StaticCache, expected an OasisCache or a DynamicCache",
            lambda m: {"draft": draft(), "draft_cache": StaticCache(m.config, max_cache_len=8)},
        ),
    }


@pytest.mark.parametrize("case", bad_calls())
def test_bad_input_is_refused_before_anything_is_read(case: str) -> None:
    error, message, options = bad_calls()[case]
    model = tiny_model("llama")
    cache = OasisCache(model, budget=256)
    call = {"custom_generate": oasis_hf.generation.generate, **options(model)}
    with pytest.raises(error, match=message):
        generate(model, prompt(batch=2), cache, **call)
    assert cache.get_seq_length() == 0


def test_bad_input_of_the_direct_call() -> None:
    model, cache = tiny_model("llama"), OasisCache(tiny_model("llama"), budget=256)
    call = functools.partial(
        oasis_hf.generation.generate, model, past_key_values=cache, max_new_tokens=4
    )
    one, other = draft_model("llama", "fair"), draft_model("llama", "good")
    with pytest.raises(ValueError, match="draft: got a model, and another one as assistant_model"):
        call(prompt(), draft=one, assistant_model=other)
    with pytest.raises(ValueError, match="streamer: got a batch of 2, expected 1"):
        call(prompt(batch=2), streamer=Tokens())
    assert cache.get_seq_length() == 0


def test_a_cache_that_holds_more_than_is_given() -> None:
    model, cache = tiny_model("llama"), OasisCache(tiny_model("llama"), **FULL)
    call = functools.partial(
        oasis_hf.generation.generate, model, past_key_values=cache, max_new_tokens=4
    )
    said = call(prompt())
    held = cache.get_seq_length()
    with pytest.raises(ValueError, match=r"input_ids: got 50 columns .* with 183 in the"):
        call(prompt(50), attention_mask=torch.ones(1, 100, dtype=torch.long))
    draft = draft_model("llama", "fair")
    with pytest.raises(ValueError, match="draft_cache: holds 0 columns of 190"):
        call(prompt(7), attention_mask=torch.ones(1, 190, dtype=torch.long), draft=draft)
    assert cache.get_seq_length() == held
    assert call(torch.cat([said, prompt(6)], 1)).shape[1] == said.shape[1] + 10
    # The beginning of what it holds is answered as by a fresh cache.
    fresh = OasisCache(model, **FULL)
    want = oasis_hf.generation.generate(
        model, prompt()[:, :50], past_key_values=fresh, max_new_tokens=4
    )
    assert torch.equal(call(prompt()[:, :50]), want)


def test_recurrent_layers_are_refused_by_name() -> None:
    model = tiny_model("qwen3_next")
    cache = OasisCache(model, budget=256)
    with pytest.raises(OasisUnsupportedError, match="LinearAttentionLayer cannot take back"):
        generate(model, prompt(), cache, custom_generate=oasis_hf.generation.generate)
    assert cache.get_seq_length() == 0
