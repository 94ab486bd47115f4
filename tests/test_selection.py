"""Which blocks are attended to: what indexes say of them, and what is done about misses."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    Driver,
    assert_close,
    dense_cache,
    forward,
    generate,
    plain_attention,
    prompt,
    random_qkv,
    tiny_model,
)
from torch import Tensor

from oasis_hf import Index, OasisCache
from oasis_hf.config import OasisConfig
from oasis_hf.geometry import ceil_div
from oasis_hf.index import INDEXES, keys2bit
from oasis_hf.ops import Choice
from oasis_kernels.reference import StepPlan, bound_logits
from oasis_kernels.reference import step as torch_step

pytestmark = pytest.mark.usefixtures("small_slabs")

SPARSE: dict[str, Any] = {
    "budget": 96,
    "block_size": 16,
    "recent_tokens": 16,
    "sink_tokens": 20,
    "max_rows": 4,
}
POLICIES: dict[str, dict[str, Any]] = {
    "fetch": {},
    "skip": {"on_miss": "skip", "fetch_cap": 0.2},
    "skip-uncapped": {"on_miss": "skip", "fetch_cap": None},
    "share": {"on_miss": 0.03},
}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Spy:
    """Records what a choice of the torch backend is asked for and decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Tensor, int, float, int]] = []
        self.plans: list[StepPlan] = []
        choose = torch_step.choose

        def watched(tables: Any, score: Tensor, choice: Choice) -> StepPlan:
            plan = choose(tables, score, choice)
            self.asked.append((score, choice.count, choice.now_above, choice.later))
            self.plans.append(plan)
            return plan

        monkeypatch.setattr(torch_step, "choose", watched)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def attend_to(driver: Driver, plan: StepPlan, query: Tensor) -> Tensor:
    """Plain attention over the blocks that a plan leaves to attend to and the tail."""
    layer, group = driver.layer, query.shape[1] // driver.layer.parts.geometry.kv_heads
    k, v, _ = layer.history(layer.parts.frontier.lengths.tolist())
    result = []
    for b in range(query.shape[0]):
        done, length = int(layer.parts.frontier.committed[b]), int(layer.parts.frontier.lengths[b])
        for h in range(layer.parts.geometry.kv_heads):
            there = (plan.hits[b, h] >= 0) | (plan.now[b, h] >= 0)
            blocks = plan.ids[b, h, there].sort().values
            kept = (
                blocks[:, None] * layer.parts.geometry.block
                + torch.arange(layer.parts.geometry.block)
            ).flatten()
            place = torch.cat([kept, torch.arange(done, length)])
            q = query[b, h * group : (h + 1) * group]
            result.append(plain_attention(q, k[b, h : h + 1, place], v[b, h : h + 1, place]))
    return torch.stack(result).view(*query.shape[:3], -1)


# ---- blocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "options", "block"),
    [
        (2048, {}, 16),
        (1024, {}, 16),
        (1016, {}, 8),
        (512, {}, 8),
        (256, {}, 4),
        (4, {}, 4),
        (512, {"on_miss": "skip"}, 16),
        (512, {"on_miss": 0.01}, 16),
        (512, {"index": "minmax"}, 16),
        (512, {"index": "oracle"}, 16),
        (512, {"index": INDEXES["keys2bit"]}, 8),
        (512, {"block_size": 32}, 32),
    ],
)
def test_small_budgets_have_finer_blocks(budget: int, options: dict[str, Any], block: int) -> None:
    config = OasisConfig(budget=budget, sink_tokens=0, **options)
    assert (config.block_tokens, config.budget_blocks) == (block, budget // block)


def test_finer_blocks_take_no_more_memory() -> None:
    """The same index and slots of the same size: what a fork with a small budget makes of them."""
    model = tiny_model("llama")
    cache = OasisCache(model, budget=1024, recent_tokens=8)
    ids = prompt(300)
    forward(model, ids[:, :-1], cache)
    fine, coarse = cache.fork(budget=128), cache.fork(budget=128, block_size=16)
    assert [x.offloaded[0].parts.geometry.block for x in (cache, fine, coarse)] == [16, 4, 16]
    assert fine.stats().resident_tokens == coarse.stats().resident_tokens == 256
    index = [
        {name: array.nbytes for name, array in x.offloaded[0].parts.index.arrays.items()}
        for x in (fine, coarse)
    ]
    assert index[0] == index[1]


def test_a_fork_with_finer_blocks_holds_the_same_tokens() -> None:
    model, ids = tiny_model("llama"), prompt(230)
    cache = OasisCache(model, budget=1024, recent_tokens=8)
    forward(model, ids[:, :-1], cache)
    fine = cache.fork(budget=256)
    assert fine.offloaded[0].parts.geometry.block == 4
    want = generate(model, ids, dense_cache(model), 12)
    assert torch.equal(generate(model, ids, fine, 12), want)


# ---- the step as a whole -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("index", sorted(INDEXES))
def test_attention_is_over_the_chosen_blocks(index: str, policy: dict[str, Any], spy: Spy) -> None:
    """Exactly: the wanted blocks that are there, and the tail; in verifications too."""
    if index not in ("keys2bit", "oracle") and "on_miss" in policy and policy["on_miss"] == 0.03:
        pytest.skip("this index does not estimate shares of attention")
    driver, generator = Driver(**SPARSE | policy, index=index, head_room=1.25), rng()
    driver.feed_random(generator, 2, 400)
    driver.cache.expect_drafts()
    for step in range(24):
        (q, _, _), (out,) = driver.feed_random(generator, 2, (1, 1, 3)[step % 3])
        assert_close(out, attend_to(driver, spy.plans[-1], q))


# B, Hq, H, Dk, Dv.
SHAPES = [
    (1, 1, 1, 64, 64),
    (3, 16, 1, 64, 64),
    (2, 8, 2, 80, 80),
    (1, 6, 3, 96, 128),
    (3, 4, 2, 128, 64),
    (1, 8, 1, 256, 256),
    (2, 3, 1, 24, 40),
]


@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_odd_shapes(shape: tuple[int, ...], index: str, spy: Spy) -> None:
    """Unequal K and V dimensions, one KV head, GQA groups of 1 to 16."""
    batch, heads, kv_heads, k_dim, v_dim = shape
    for full in (True, False):
        options = SPARSE | {"budget": 384 if full else 64, "index": index}
        driver, generator, fed = Driver(**options), rng(), []
        for rows in (200, 1, 1, 70, 1):
            fed.append(random_qkv(generator, batch, rows, heads, kv_heads, k_dim, v_dim))
            (out,) = driver.feed(*fed[-1])
        if full:
            k, v = (torch.cat([x[n] for x in fed], 2) for n in (1, 2))
            want = torch.stack([plain_attention(*x) for x in zip(fed[-1][0], k, v, strict=True)])
        else:
            want = attend_to(driver, spy.plans[-1], fed[-1][0])
        assert_close(out, want)


# ---- what is wanted ------------------------------------------------------------------------------


def score_of(driver: Driver, query: Tensor, spy: Spy) -> Tensor:
    """The score `[B, H, N]` that the layer gives its blocks for one more token with this query."""
    batch, heads = query.shape[0], driver.layer.parts.geometry.kv_heads
    new = torch.zeros(batch, heads, 1, query.shape[-1])
    driver.feed(query, new, new)
    return spy.asked[-1][0]


@pytest.mark.parametrize("index", sorted(INDEXES))
@pytest.mark.parametrize("sink_tokens", [0, 16, 20])
def test_sinks_are_always_chosen(index: str, sink_tokens: int, spy: Spy) -> None:
    """The first tokens, rounded up to blocks, whatever their score; and no more than these."""
    driver = Driver(**(SPARSE | {"sink_tokens": sink_tokens, "index": index}))
    generator = rng()
    _, k, v = random_qkv(generator, 2, 400)
    # Keys that no query likes.
    k[:, :, :64] = 0
    k[..., 0] = torch.where(torch.arange(400) < 64, -20.0, 1.0)
    driver.feed(random_qkv(generator, 2, 400)[0], k, v)
    for _ in range(5):
        q, k, v = random_qkv(generator, 2, 1)
        q[..., 0] = 5
        driver.feed(q, k, v)
        ids = spy.plans[-1].ids
        sinks = ceil_div(sink_tokens, 16)
        for block in range(4):
            assert bool((ids == block).any(-1).all()) == (block < sinks)


@pytest.mark.parametrize("index", sorted(INDEXES))
def test_only_committed_blocks_are_wanted(index: str, spy: Spy) -> None:
    """Of each sequence: not those of a longer neighbour, not those still to come."""
    driver, generator = Driver(**(SPARSE | {"index": index, "budget": 256})), rng()
    mask = torch.ones(3, 200, dtype=torch.bool)
    mask[1, :90] = mask[2, :195] = False
    driver.feed_random(generator, 3, 200, mask)
    for _ in range(3):
        driver.feed_random(generator, 3, 1)
        plan, committed = spy.plans[-1], driver.layer.parts.frontier.committed // 16
        assert committed.tolist()[2] == 0
        for row, count in enumerate(committed.tolist()):
            for h in range(2):
                wanted = plan.ids[row, h, plan.wanted[row, h]].tolist()
                assert sorted(wanted) == list(range(count))


def test_oracle_scores_are_the_true_shares(spy: Spy) -> None:
    """The mean over a GQA group of each block's softmax, to the eight bits that scores have."""
    driver, generator = Driver(**(SPARSE | {"index": "oracle", "sink_tokens": 0})), rng()
    driver.feed_random(generator, 2, 400)
    q = random_qkv(generator, 2, 1)[0]
    score = score_of(driver, q, spy)
    want = shares(driver, q)
    assert bool(((score[..., : want.shape[-1]] - want).abs() <= want * 2**-7).all())


def shares(driver: Driver, query: Tensor) -> Tensor:
    """The true share of attention `[B, H, blocks]` of each committed block, mean over a group."""
    layer = driver.layer
    k, _, _ = layer.history(layer.parts.frontier.lengths.tolist())
    heads, size = layer.parts.geometry.kv_heads, layer.parts.geometry.block
    logits = query.unflatten(1, (heads, -1)) @ k[:, :, None].mT * query.shape[-1] ** -0.5
    blocks = int(layer.parts.frontier.committed[0]) // size
    share = logits.softmax(-1)[..., 0, : blocks * size].mean(2)
    return share.unflatten(-1, (blocks, size)).sum(-1)


@pytest.mark.parametrize(
    ("index", "least"), [("oracle", 0.999), ("keys2bit", 0.8), ("minmax", 0.5)]
)
def test_choice_holds_most_of_the_attention(index: str, least: float, spy: Spy) -> None:
    """Against the best choice of as many blocks; random keys of few dimensions are the worst."""
    driver, generator = Driver(**(SPARSE | {"index": index, "sink_tokens": 0})), rng()
    _, k, v = random_qkv(generator, 1, 800)
    driver.feed(random_qkv(generator, 1, 800)[0], k, v)
    held = best = 0.0
    for _ in range(20):
        q = random_qkv(generator, 1, 1)[0]
        score_of(driver, q, spy)
        mass, ids = shares(driver, q), spy.plans[-1].ids
        held += float(mass.gather(-1, ids).sum())
        best += float(mass.topk(ids.shape[-1]).values.sum())
    assert least * best <= held <= best + 1e-4


def test_keys2bit_estimates_shares(spy: Spy) -> None:
    """Close to the true share, where logits are not far larger than the error of two bits."""
    driver, generator = Driver(**(SPARSE | {"sink_tokens": 0})), rng()
    driver.feed_random(generator, 2, 500)
    q = random_qkv(generator, 2, 1)[0] / 2
    score = score_of(driver, q, spy)
    want = shares(driver, q)
    got = score[..., : want.shape[-1]]
    assert (got - want).abs().sum(-1).max() < 0.2
    assert torch.corrcoef(torch.stack([got.flatten(), want.flatten()]))[0, 1] > 0.8


def test_minmax_bounds_every_logit() -> None:
    driver, generator = Driver(**SPARSE, index="minmax"), rng()
    _, k, _ = driver.feed_random(generator, 2, 400)[0]
    index, query = driver.layer.parts.index, random_qkv(generator, 2, 3)[0][:, :2]
    blocks = int(driver.layer.parts.frontier.committed[0]) // 16
    bound = index.block_logits(query, torch.ones(2, 1, index.capacity, dtype=torch.bool))
    logits = (query @ k[:, :, : blocks * 16].mT).unflatten(-1, (blocks, 16)).amax(-1)
    assert bool((bound[..., :blocks] >= logits - 1e-4).all())


def test_keys2bit_refines_the_candidates_with_the_largest_bounds(
    spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all groups the coarse level has no say; with room for two, two are scored."""
    scores = {}
    for tokens in (10**6, 64):
        monkeypatch.setattr(keys2bit, "candidate_tokens", lambda budget, n=tokens: n)
        driver, generator = Driver(**(SPARSE | {"sink_tokens": 0})), rng()
        driver.feed_random(generator, 1, 800)
        q = random_qkv(generator, 1, 1)[0]
        scores[tokens] = score_of(driver, q, spy)
    blocks = int(driver.layer.parts.frontier.committed[0]) // 16
    everything, few = (scores[n][..., :blocks] for n in (10**6, 64))
    assert bool((everything > 0).all())
    groups = (few > 0).unflatten(-1, (-1, 2))
    assert torch.equal(groups.any(-1), groups.all(-1))
    assert groups.any(-1).sum(-1).tolist() == [[2, 2]]
    # Among fewer the share of each is larger.
    assert bool((few[few > 0] >= everything[few > 0]).all())
    low, step = (
        driver.layer.parts.index.arrays[name][:, :, : blocks // 2] for name in ("lowest", "step")
    )
    query = q.unflatten(1, (2, 2))[..., 0, :] / 4
    bound = bound_logits(query, low, low + 3 * step).softmax(-1).mean(2)
    assert torch.equal(
        bound.topk(2).indices.sort().values, groups.any(-1).nonzero()[:, 2].view(1, 2, 2)
    )


def test_streaming_wants_the_newest(spy: Spy) -> None:
    driver = Driver(**SPARSE, index="streaming")
    driver.feed_random(rng(), 1, 400)
    driver.feed_random(rng(), 1, 1)
    blocks = int(driver.layer.parts.frontier.committed[0]) // 16
    sinks = [0, 1]
    want = sorted(sinks + list(range(blocks - 4, blocks)))
    assert sorted(spy.plans[-1].ids[0, 0].tolist()) == want


@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
def test_reductions_differ(index: str, spy: Spy) -> None:
    """One loud query row outvotes the others by its logits, and does not by its share."""
    chosen = []
    for reduction in ("mean", "max"):
        options = SPARSE | {"sink_tokens": 0, "index": index, "reduction": reduction}
        driver, generator = Driver(**options), rng()
        driver.feed_random(generator, 1, 600)
        q = random_qkv(generator, 1, 1)[0]
        q[:, 0] *= 30
        score_of(driver, q, spy)
        chosen.append(spy.plans[-1].ids[0, 0].sort().values)
    assert not torch.equal(*chosen)


def test_equal_scores_prefer_the_later_block(spy: Spy) -> None:
    """A zero query, as a padding token's embedding gives, ties all blocks."""
    driver, generator = Driver(**(SPARSE | {"sink_tokens": 0})), rng()
    driver.feed_random(generator, 1, 400)
    score_of(driver, torch.zeros(1, 4, 1, 16), spy)
    blocks = int(driver.layer.parts.frontier.committed[0]) // 16
    assert spy.plans[-1].ids[0, 0].tolist() == list(range(blocks - 1, blocks - 7, -1))


# ---- what is fetched -----------------------------------------------------------------------------


def walk(driver: Driver, spy: Spy, steps: int = 30) -> list[StepPlan]:
    """The plans of decode steps after a prompt, the first fill left out."""
    generator = rng()
    driver.feed_random(generator, 2, 500)
    for _ in range(steps):
        driver.feed_random(generator, 2, 1)
    assert len(spy.plans) == steps + 1
    return spy.plans[1:]


def test_fetch_misses_nothing(spy: Spy) -> None:
    plans = walk(Driver(**SPARSE, head_room=1), spy)
    assert sum(int((p.now >= 0).sum()) for p in plans) > 0
    for plan in plans:
        assert torch.equal((plan.hits >= 0) | (plan.now >= 0), plan.wanted)
        assert not (plan.later >= 0).any()


@pytest.mark.parametrize("cap", [0, 0.0, 1 / 6, 0.5, None], ids=lambda c: f"cap {c}")
def test_skip_fetches_behind_up_to_the_cap(cap: float | None, spy: Spy) -> None:
    """Never before attention; the best misses first; what was fetched is there in the next step."""
    plans = walk(Driver(**SPARSE, head_room=1, on_miss="skip", fetch_cap=cap), spy)
    blocks = 6 if cap is None else round(6 * cap)
    for plan, after in pairwise(plans):
        assert not (plan.now >= 0).any()
        missing = plan.wanted & (plan.hits < 0)
        later = plan.later >= 0
        assert torch.equal(later, missing & (missing.cumsum(-1) <= blocks))
        for b, h, k in later.nonzero().tolist():
            again = after.ids[b, h] == plan.ids[b, h, k]
            assert (after.hits[b, h][again] >= 0).all()


def test_without_lookahead_nothing_moves_between_steps(spy: Spy) -> None:
    """Only the first fill, and what leaves the tail, is ever resident."""
    driver = Driver(**SPARSE, head_room=1, on_miss="skip", fetch_cap=0.0)
    plans = walk(driver, spy)
    stats = driver.cache.stats()
    assert stats.bytes_fetched == stats.bytes_filled > 0
    assert (stats.cap_blocks, stats.cap_share, stats.admitted) == (0, 0.0, 0.0)
    assert stats.refused == pytest.approx(1 - stats.hit_rate) and stats.refused > 0
    assert all(not (plan.later >= 0).any() for plan in plans)


def test_share_fetches_now_what_matters(spy: Spy) -> None:
    """Misses above the share before attention, of the rest the cap's number afterwards."""
    plans = walk(Driver(**SPARSE, head_room=1, on_miss=0.05, fetch_cap=1 / 6), spy)
    counts = {"now": 0, "later": 0}
    for (score, *_), plan in zip(spy.asked[1:], plans, strict=True):
        missing = plan.wanted & (plan.hits < 0)
        large = score.gather(-1, plan.ids) > 0.05
        assert torch.equal(plan.now >= 0, missing & large)
        assert bool(((plan.later >= 0).sum(-1) <= 1).all())
        assert not ((plan.later >= 0) & large).any()
        counts["now"] += int((plan.now >= 0).sum())
        counts["later"] += int((plan.later >= 0).sum())
    assert min(counts.values()) > 0


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_counters_add_up(policy: dict[str, Any], spy: Spy) -> None:
    """The stats are sums over the plans, in blocks and in bytes."""
    driver = Driver(**SPARSE | policy, head_room=1.25)
    plans = walk(driver, spy)
    stats = driver.cache.stats()
    wanted = sum(int(p.wanted.sum()) for p in plans)
    sums = {
        name: sum(int((getattr(p, name) >= 0).sum()) for p in plans)
        for name in ("hits", "now", "later")
    }
    assert stats.steps == len(plans)
    assert stats.hit_rate == pytest.approx(sums["hits"] / wanted)
    assert stats.fetched_now == pytest.approx(sums["now"] / wanted)
    assert stats.admitted == pytest.approx(sums["later"] / wanted)
    assert stats.refused == pytest.approx(1 - sum(sums.values()) / wanted)
    filled = int((spy.plans[0].now >= 0).sum())
    block_bytes = 16 * 2 * 16 * 4
    assert stats.bytes_filled == filled * block_bytes
    assert stats.bytes_fetched == (filled + sums["now"] + sums["later"]) * block_bytes


def test_turnover_is_what_the_step_before_did_not_want(spy: Spy) -> None:
    plans = walk(Driver(**SPARSE, head_room=4), spy)
    for number, (before, plan) in enumerate(pairwise(plans)):
        old = (plan.ids[..., None] == before.ids[..., None, :]).any(-1)
        # A block that was in the tail has been attended to: it is none that comes in.
        was_there = spy.asked[number + 1][0].gather(-1, plan.ids) > float("-inf")
        assert torch.equal(plan.turnover, ~old & was_there)


def test_first_step_fills_the_head_room_too(spy: Spy) -> None:
    driver = Driver(**SPARSE, head_room=2)
    driver.feed_random(rng(), 1, 500)
    driver.feed_random(rng(), 1, 1)
    fill, step = spy.plans
    assert fill.ids.shape[-1] == 12 and bool((fill.now >= 0).all())
    assert bool((step.hits >= 0).all()) and torch.equal(step.ids, fill.ids[..., :6])


def test_blocks_that_leave_the_tail_are_resident_without_a_fetch() -> None:
    driver, generator = Driver(**SPARSE), rng()
    driver.feed_random(generator, 1, 30)
    for _ in range(130):
        driver.feed_random(generator, 1, 1)
    counts = driver.layer.parts.counters.read()
    assert counts["filled"] + counts["now"] + counts["later"] == 0
    resident = driver.layer.parts.residency.block_of_slot[0, 0, :-1]
    assert sorted(resident[resident >= 0].tolist()) == list(range(8))


# ---- an index of one's own -----------------------------------------------------------------------


class SumIndex(Index):
    """Ranks a block by the logit of the sum of its keys; eight bytes a block would do."""

    name = "sum"

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        """Sum of each block."""
        return {"sum": keys.sum(-2)}

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        """Logit of the sum."""
        return query @ self.arrays["sum"][:, :, :-1].mT


def test_an_index_of_ones_own_is_short() -> None:
    assert len(inspect.getsource(SumIndex).splitlines()) < 40


@pytest.mark.parametrize("options", [{}, {"assistant": True}, {"num_beams": 2}], ids=str)
def test_an_index_of_ones_own_serves_generate(options: dict[str, Any]) -> None:
    if options.pop("assistant", False):
        options = {"prompt_lookup_num_tokens": 4}
    model, reference = tiny_model("llama"), tiny_model("llama", "sdpa")
    want = generate(reference, prompt(), dense_cache(reference), tokens=12, **options)
    cache = OasisCache(model, **FULL, index=SumIndex)
    assert torch.equal(generate(model, prompt(), cache, tokens=12, **options), want)


def test_an_index_of_ones_own_chooses(spy: Spy) -> None:
    driver, generator = Driver(**(SPARSE | {"index": SumIndex, "sink_tokens": 0})), rng()
    _, k, v = random_qkv(generator, 1, 400)
    k[:, :, 64:80] += 1
    driver.feed(random_qkv(generator, 1, 400)[0], k, v)
    driver.feed(torch.ones(1, 4, 1, 16), k[:, :, :1], v[:, :, :1])
    assert spy.plans[-1].ids[0, :, 0].tolist() == [4, 4]


def test_an_index_of_ones_own_is_saved_by_name(tmp_path: Any) -> None:
    driver = Driver(**SPARSE | {"index": SumIndex})
    driver.feed_random(rng(), 1, 200)
    driver.cache.save(tmp_path / "cache")
    loaded = OasisCache.load(tmp_path / "cache", driver.cache.model_config, index=SumIndex)
    stored = loaded.layers[0].parts.index.arrays["sum"]
    assert torch.equal(
        stored[:, :, :-1], driver.layer.parts.index.arrays["sum"][:, :, : stored.shape[2] - 1]
    )
    assert math.isfinite(float(stored.sum()))
