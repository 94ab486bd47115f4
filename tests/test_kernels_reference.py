"""What each operation of the kernels' torch reference means, checked against plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_close
from torch import Tensor

from oasis_kernels import reference as ops

NEG_INF = float("-inf")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=rng(seed))


# ---- the tail ring -------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [4, 7, 64])
def test_ring_holds_the_newest_tokens(places: int) -> None:
    """Tokens written in pieces of any size, padding between them, are found by position."""
    ring, written = torch.zeros(2, 3, places + 1, 5), [[], []]
    lengths, generator = torch.zeros(2, dtype=torch.long), rng()
    for step in range(40):
        rows = randn(2, 3, 1 + step % min(places, 5), 5, seed=step)
        valid = torch.rand(2, rows.shape[2], generator=generator) < 0.7
        positions = lengths[:, None] + valid.long().cumsum(-1) - 1
        ops.ring_write(ring, rows, positions, valid)
        lengths += valid.sum(1)
        for b in range(2):
            written[b] += list(rows[b, :, valid[b]].unbind(1))
        held = ops.ring_positions(lengths, places)
        for b in range(2):
            newest = range(max(0, len(written[b]) - places), len(written[b]))
            assert sorted(p for p in held[b].tolist() if p >= 0) == list(newest)
            for place, position in enumerate(held[b].tolist()):
                if position >= 0:
                    assert torch.equal(ring[b, :, place], written[b][position])


def test_ring_read_wraps_around() -> None:
    ring = torch.arange(9.0).expand(1, 2, 9)[..., None]
    start = torch.tensor([6])
    assert ops.ring_read(ring, start, 5)[0, 0, :, 0].tolist() == [6, 7, 0, 1, 2]


def test_blocks_are_gathered_and_scattered_per_head() -> None:
    table, rows = randn(2, 3, 10, 4), randn(2, 3, 2, 4, seed=1)
    blocks = torch.stack([torch.randperm(10, generator=rng(n))[:2] for n in range(6)])
    blocks = blocks.view(2, 3, 2)
    before = table.clone()
    ops.scatter_blocks(table, blocks, rows)
    assert torch.equal(ops.gather_blocks(table, blocks), rows)
    untouched = torch.ones(2, 3, 10, dtype=torch.bool).scatter(2, blocks, False)
    assert torch.equal(table[untouched], before[untouched])


def test_equal_scores_prefer_the_later_block_whatever_their_sign() -> None:
    score = torch.tensor([-1.5, 0.0, float("inf"), -0.0, 2.0, -1.5, float("-inf"), -2.0])
    ids, best = ops.select_blocks(score.expand(1, 1, -1), 8)
    assert ids[0, 0].tolist() == [2, 4, 3, 1, 5, 0, 7, 6]
    assert torch.equal(best, score[ids])


# ---- summaries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [4, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_two_bit_keys_are_off_by_half_a_step(tokens: int, dim: int) -> None:
    keys = 3 * randn(2, 3, 5, tokens, dim) + randn(dim, seed=1)
    codes, lowest, step = ops.quantize_keys_2bit(keys)
    assert codes.shape == (2, 3, 5, tokens, dim // 4) and codes.dtype == torch.uint8
    again = ops.dequantize_keys_2bit(codes, lowest, step)
    slack = 1e-5 * keys.abs().max()
    assert bool(((again - keys).abs() <= step[..., None, :] / 2 + slack).all())


def test_two_bit_keys_are_bounded_by_what_is_stored() -> None:
    """`lowest` and `lowest + 3 * step` are the group's minimum and maximum."""
    keys = randn(2, 3, 5, 64, 32)
    _, lowest, step = ops.quantize_keys_2bit(keys)
    assert torch.equal(lowest, keys.amin(-2))
    assert_close(lowest + 3 * step, keys.amax(-2), rounding=4)


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_two_bit_keys_of_a_constant_channel_are_exact(value: float) -> None:
    keys = randn(1, 1, 64, 8)
    keys[..., 3] = value
    again = ops.dequantize_keys_2bit(*ops.quantize_keys_2bit(keys))
    assert torch.isfinite(again).all() and bool((again[..., 3] == value).all())


def test_two_bit_keys_in_bfloat16_cost_half_a_step_and_its_rounding() -> None:
    keys = randn(4, 64, 32).bfloat16()
    codes, lowest, step = ops.quantize_keys_2bit(keys)
    assert lowest.dtype == step.dtype == torch.bfloat16
    error = (ops.dequantize_keys_2bit(codes, lowest, step) - keys.float()).abs()
    assert bool((error <= step.float()[..., None, :] * (0.5 + 3 * 2**-8)).all())


def test_two_bit_codes_lie_as_documented() -> None:
    """Byte j holds channels j, j + D/4, j + D/2 and j + 3D/4, lowest bits first."""
    keys = torch.zeros(4, 8)
    for channel in range(8):
        keys[:, channel] = (torch.arange(4) + channel) % 4
    codes, lowest, step = ops.quantize_keys_2bit(keys)
    assert lowest.tolist() == [0] * 8 and step.tolist() == [1] * 8
    for token in range(4):
        for byte in range(2):
            parts = [(token + byte + 2 * quarter) % 4 for quarter in range(4)]
            assert codes[token, byte] == sum(part << 2 * n for n, part in enumerate(parts))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_bound_is_the_best_corner(dim: int) -> None:
    """No key between the bounds has a larger logit, and one corner has exactly this one."""
    keys, query = randn(2, 3, 7, 16, dim), randn(2, 3, 5, dim, seed=1)
    low, high = keys.amin(-2), keys.amax(-2)
    bound = ops.bound_logits(query, low, high)
    logits = torch.einsum("bhqd,bhntd->bhqnt", query, keys)
    assert bool((bound >= logits.amax(-1) - 1e-3).all())
    q = query[:, :, :, None]
    assert_close(bound, torch.maximum(q * low[:, :, None], q * high[:, :, None]).sum(-1))


# ---- from logits to a choice ---------------------------------------------------------------------


def test_mean_reduction_is_the_mean_share_of_attention() -> None:
    """Eight bits of it; what is left belongs to the tail."""
    logits, rest = 2 * randn(2, 3, 6, 10), randn(2, 3, 6, seed=1)
    live = (torch.arange(10)[None] < torch.tensor([10, 4])[:, None])[:, None]
    score = ops.reduce_rows(logits, live, rest, "mean")
    for b, count in enumerate((10, 4)):
        both = torch.cat([logits[b, :, :, :count], rest[b][..., None]], -1)
        want = both.double().softmax(-1)[..., :count].mean(1)
        assert bool(((score[b, :, :count] - want).abs() <= want * 2**-7).all())
        assert bool((score[b, :, count:] == NEG_INF).all())


def test_max_reduction_is_the_largest_logit() -> None:
    logits = randn(2, 3, 6, 10)
    live = torch.ones(2, 1, 10, dtype=torch.bool)
    live[1, 0, 7:] = False
    score = ops.reduce_rows(logits, live, None, "max")
    assert torch.equal(score[0], logits[0].amax(1))
    assert torch.equal(score[1, :, :7], logits[1, :, :, :7].amax(1))
    assert bool((score[1, :, 7:] == NEG_INF).all())


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_rows_of_padding_have_no_say(reduction: str) -> None:
    logits, rest = randn(1, 2, 6, 10), randn(1, 2, 6, seed=1)
    live, real = torch.ones(1, 1, 10, dtype=torch.bool), torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    given = rest if reduction == "mean" else None
    want = ops.reduce_rows(
        logits[:, :, real], live, None if given is None else given[:, :, real], reduction
    )
    rest[:, :, ~real] = NEG_INF
    logits[:, :, ~real] = float("nan")
    got = ops.reduce_rows(logits, live, given, reduction, real.expand(1, 2, 6))
    assert_close(got, want)
    nothing = ops.reduce_rows(logits, live, given, reduction, torch.zeros(1, 2, 6).bool())
    assert bool((nothing == NEG_INF).all())


def test_select_prefers_the_later_of_equal_blocks() -> None:
    score = torch.tensor([[[1.0, 3.0, 1.0, 3.0, NEG_INF, 1.0, 0.0]]])
    ids, value = ops.select_blocks(score, 7)
    assert ids[0, 0].tolist() == [3, 1, 5, 2, 0, 6, 4]
    assert value[0, 0].tolist() == [3, 3, 1, 1, 1, 0, NEG_INF]
    assert ops.select_blocks(score, 3)[0][0, 0].tolist() == [3, 1, 5]


def test_select_is_a_stable_descending_sort_per_head() -> None:
    score = (10 * torch.rand(3, 4, 50, generator=rng())).round()
    ids, value = ops.select_blocks(score, 20)
    for b in range(3):
        for h in range(4):
            order = sorted(range(50), key=lambda n: (-score[b, h, n].item(), -n))
            assert ids[b, h].tolist() == order[:20]
            assert value[b, h].tolist() == [score[b, h, n].item() for n in order[:20]]


# ---- residency -----------------------------------------------------------------------------------


def tables(blocks: int, slots: int, shape: tuple[int, int] = (1, 1)) -> tuple[Tensor, ...]:
    """Empty slot_of_block, block_of_slot, last_selected; and the clock."""
    width = (blocks + 1, slots + 1, slots + 1)
    empty = [torch.full((*shape, n), -1, dtype=torch.int32) for n in width]
    return (*empty, torch.ones(1, dtype=torch.int32))


def test_free_slots_are_given_first_then_the_least_recently_selected() -> None:
    slot_of, block_of, last, clock = tables(20, 4)
    for slot, (block, step) in enumerate([(5, 3), (9, 1), (2, 1)]):
        slot_of[..., block], block_of[..., slot], last[..., slot] = slot, block, step
    clock.fill_(4)
    ids = torch.tensor([[[11, 12, 13, 14]]])
    take = torch.tensor([[[True, True, False, True]]])
    slots = ops.assign_slots(ids, take, slot_of, block_of, last, clock)
    # Slot 3 is free; of blocks 9 and 2, equally old, the lower goes first.
    assert slots.tolist() == [[[3, 2, -1, 1]]]
    assert block_of[0, 0, :4].tolist() == [5, 14, 12, 11]
    assert last[0, 0, :4].tolist() == [3, 4, 4, 4]
    resident = {n: s for n, s in enumerate(slot_of[0, 0, :20].tolist()) if s >= 0}
    assert resident == {5: 0, 14: 1, 12: 2, 11: 3}


class PlainLru:
    """The residency of one head, in plain Python: block to step of its last selection."""

    def __init__(self, slots: int) -> None:
        self.slots, self.held = slots, {}

    def step(
        self, ids: list[int], score: list[float], clock: int, now_above: float, cap: int
    ) -> tuple[set[int], set[int], set[int]]:
        """Hits, fetched now, fetched later."""
        wanted = [(n, s) for n, s in zip(ids, score, strict=True) if s > NEG_INF]
        hits = {n for n, _ in wanted if n in self.held}
        now = [n for n, s in wanted if n not in hits and s > now_above]
        later = [n for n, _ in wanted if n not in hits and n not in now][:cap]
        self.held |= dict.fromkeys(hits, clock)
        taken = set(now) | set(later)
        for block in [n for n, _ in wanted if n in taken]:
            if len(self.held) >= self.slots:
                victim = min(self.held, key=lambda n: (self.held[n], n))
                assert self.held[victim] < clock, "a selected block is evicted"
                del self.held[victim]
            self.held[block] = clock
        return hits, set(now), set(later)


@pytest.mark.parametrize("slots", [8, 11, 30], ids=lambda n: f"{n} slots")
@pytest.mark.parametrize("now_above", [-math.inf, 0.5, math.inf], ids=["fetch", "share", "skip"])
@pytest.mark.parametrize("cap", [1, 3, 8], ids=lambda n: f"cap {n}")
def test_plan_is_a_plain_lru(slots: int, now_above: float, cap: int) -> None:
    """Hits, both kinds of fetches, victims and tables, over many steps of two heads."""
    blocks, wanted = 25, 8
    slot_of, block_of, last, clock = tables(blocks, slots, (1, 2))
    heads, generator = [PlainLru(slots), PlainLru(slots)], rng()
    score = torch.rand(1, 2, blocks, generator=generator)
    for step in range(1, 60):
        clock.fill_(step)
        # The choice drifts, as that of successive queries does; some blocks may not be chosen.
        score = 0.7 * score + 0.3 * torch.rand(1, 2, blocks, generator=generator)
        given = torch.where(torch.rand(1, 2, blocks, generator=generator) < 0.3, NEG_INF, score)
        ids, value = ops.select_blocks(given, wanted)
        hits, now, later = ops.plan_step(ids, value, slot_of, block_of, last, clock, now_above, cap)
        for h, plain in enumerate(heads):
            want = plain.step(ids[0, h].tolist(), value[0, h].tolist(), step, now_above, cap)
            for slots_given, expected in zip((hits, now, later), want, strict=True):
                mine = slots_given[0, h] >= 0
                assert set(ids[0, h, mine].tolist()) == expected
                held = block_of[0, h].gather(0, slots_given[0, h, mine])
                assert held.tolist() == ids[0, h, mine].tolist()
            resident = {n: s for n, s in enumerate(slot_of[0, h, :blocks].tolist()) if s >= 0}
            assert resident.keys() == plain.held.keys()
            assert all(block_of[0, h, s] == n for n, s in resident.items())
            assert {n: int(last[0, h, s]) for n, s in resident.items()} == plain.held


# ---- attention -----------------------------------------------------------------------------------

# B, H, G, T, Dk, Dv.
SHAPES = [
    (1, 1, 1, 1, 64, 64),
    (3, 1, 16, 1, 64, 64),
    (2, 2, 4, 3, 80, 80),
    (1, 3, 2, 5, 96, 128),
    (3, 2, 1, 2, 128, 64),
    (1, 1, 8, 1, 256, 256),
    (2, 1, 3, 4, 24, 40),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def attention_case(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Slots with gaps, a tail seen causally, NaN in all that is hidden."""
    batch, heads, group, rows, k_dim, v_dim = shape
    slots = torch.stack(
        [torch.randperm(9, generator=rng(n))[:5] for n in range(batch * heads)]
    ).view(batch, heads, 5)
    slots[0, 0, 1:3] = -1
    seen = torch.arange(12)[None, None] <= 7 + torch.arange(rows)[None, :, None]
    case = {
        "query": randn(batch, heads, group, rows, k_dim),
        "pool_k": randn(batch, heads, 10, 4, k_dim, seed=1),
        "pool_v": randn(batch, heads, 10, 4, v_dim, seed=2),
        "tail_k": randn(batch, heads, 13, k_dim, seed=3),
        "tail_v": randn(batch, heads, 13, v_dim, seed=4),
    }
    case = {name: tensor.to(dtype) for name, tensor in case.items()}
    hidden = torch.ones(batch, heads, 10, dtype=torch.bool)
    hidden.scatter_(2, slots.clamp(min=0), False)
    hidden[0, 0, 0] = 0 not in slots[0, 0]
    for name in ("pool_k", "pool_v"):
        case[name][hidden] = float("nan")
    for name in ("tail_k", "tail_v"):
        case[name][:, :, 7 + rows :] = float("nan")
    return case | {"slots": slots, "tail_mask": seen.expand(batch, -1, -1).clone()}


def plain_sparse(case: dict[str, Tensor], scaling: float) -> Tensor:
    """The same in float64, one row at a time."""
    query = case["query"].double()
    batch, heads, group, rows, _ = query.shape
    out = query.new_zeros(batch, heads, group, rows, case["pool_v"].shape[-1])
    for b in range(batch):
        for h in range(heads):
            chosen = [slot for slot in case["slots"][b, h].tolist() if slot >= 0]
            for t in range(rows):
                seen = case["tail_mask"][b, t].nonzero()[:, 0]
                k, v = (
                    torch.cat(
                        [
                            case[f"pool_{x}"][b, h, chosen].flatten(0, 1),
                            case[f"tail_{x}"][b, h, seen],
                        ]
                    ).double()
                    for x in "kv"
                )
                if len(k):
                    out[b, h, :, t] = (query[b, h, :, t] @ k.T * scaling).softmax(-1) @ v
    return out


@shapes
def test_sparse_attention_is_attention_over_the_chosen(shape: tuple[int, ...]) -> None:
    case, scaling = attention_case(shape, torch.float32), shape[4] ** -0.5
    out = ops.sparse_attention(**case, scaling=scaling)
    assert_close(out, plain_sparse(case, scaling).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_sparse_attention_errs_no_more_than_torch_in_low_precision(dtype: torch.dtype) -> None:
    """Against float64, with the error of plain torch attention in this dtype as the measure."""
    case = attention_case((2, 2, 4, 3, 64, 64), dtype)
    want = plain_sparse(case, 0.125)
    error = (ops.sparse_attention(**case, scaling=0.125).double() - want).abs().max()
    q, k, v = (randn(2, 4, 32, 64, seed=n).to(dtype) for n in range(3))
    exact = (q.double() @ k.double().mT * 0.125).softmax(-1) @ v.double()
    eager = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.125)
    allowed = (eager.double() - exact).abs().max()
    assert error <= 2 * allowed + torch.finfo(dtype).eps * want.abs().max()


def test_rows_that_see_nothing_give_zeros() -> None:
    case = attention_case((2, 2, 2, 3, 16, 16), torch.float32)
    case["slots"][1] = -1
    case["tail_mask"][1, 1] = False
    out = ops.sparse_attention(**case, scaling=1.0)
    assert bool((out[1, :, :, 1] == 0).all())
    assert_close(out, plain_sparse(case, 1.0).float())


@shapes
def test_tail_logsumexp(shape: tuple[int, ...]) -> None:
    case, scaling = attention_case(shape, torch.float32), shape[4] ** -0.5
    case["tail_mask"][0, 0] = False
    got = ops.tail_logsumexp(case["query"] * scaling, case["tail_k"], case["tail_mask"])
    batch, heads, group, rows, _ = case["query"].shape
    for b in range(batch):
        for h in range(heads):
            for t in range(rows):
                seen = case["tail_mask"][b, t].nonzero()[:, 0]
                logits = case["query"][b, h, :, t] @ case["tail_k"][b, h, seen].T * scaling
                place = torch.arange(group) * rows + t
                if len(seen):
                    assert_close(got[b, h, place], torch.logsumexp(logits, -1))
                else:
                    assert bool((got[b, h, place] == NEG_INF).all())


def test_8_bit_floats_bound_what_they_stand_for() -> None:
    """Outwards, by less than an eighth; exact numbers stay; beyond the largest, the largest."""
    torch.manual_seed(0)
    x = torch.randn(20_000) * torch.logspace(-6, 2, 20_000)
    low, high = (ops.floats(ops.to_float8(x, up)) for up in (False, True))
    assert bool(((low <= x) & (x <= high)).all())
    for bound in (low, high):
        assert bool(((bound - x).abs() <= (x.abs() / 8).clamp(min=2**-6)).all())
    exact = torch.arange(256, dtype=torch.uint8)
    values = ops.floats(exact)
    normal = values.isfinite() & ((values.abs() >= 2**-6) | (values == 0))
    for up in (False, True):
        assert torch.equal(ops.to_float8(values[normal], up), exact[normal])
        assert ops.floats(ops.to_float8(torch.tensor([1e4, -1e4]), up)).tolist() == [448, -448]
