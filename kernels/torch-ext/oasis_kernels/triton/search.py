"""Threshold search inside one program: the k-th largest of many keys without sorting them."""

import triton
import triton.language as tl


@triton.jit
def ordered_key(x):
    """Map float32 to uint32 so that the order is kept; -inf becomes small but not zero."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


LARGEST_KEY = tl.constexpr(2**12 - 1)
LEAST_SHARE = tl.constexpr(0x30000000)  # 2**-31, as the bits of a float32.
KEY_OFFSET = tl.constexpr(0x3000 - 2)


@triton.jit
def share_key(x):
    """Map truncated shares to 12 bits: 1 for zero, the largest number for infinity."""
    upper = (x.to(tl.int32, bitcast=True) >> 16) - KEY_OFFSET
    key = tl.where(x > 0.0, tl.minimum(upper, LARGEST_KEY), 1)
    return key.to(tl.uint32)


@triton.jit
def truncate_share(x):
    """As `reference.truncate_share`."""
    upper = x.to(tl.int32, bitcast=True) & -65536
    return tl.where(upper >= LEAST_SHARE, upper, 0).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(key, count, BITS: tl.constexpr):
    """The largest t with at least `count` keys >= t; 0 if there are fewer keys above zero.

    Two bits are decided per pass; the three counts of a pass share one sum.

    Args:
        key: `[N]` uint32 below 2**BITS, N < 2**20.
        count: scalar, at least 1.
        BITS: bits that are searched, even.
    """
    ONE: tl.constexpr = 10 if key.shape[0] < 1024 else 20
    KIND: tl.constexpr = tl.int32 if key.shape[0] < 1024 else tl.int64
    FIELD: tl.constexpr = (1 << ONE) - 1
    threshold = tl.full((1,), 0, tl.uint32)
    for step in tl.static_range(BITS // 2):
        unit = tl.full((1,), 1 << (BITS - 2 * (step + 1)), tl.uint32)
        packed = (key >= threshold + unit).to(KIND)
        packed += (key >= threshold + 2 * unit).to(KIND) << ONE
        packed += (key >= threshold + 3 * unit).to(KIND) << (2 * ONE)
        above = tl.sum(packed, 0)
        best = (above & FIELD >= count).to(tl.uint32)
        best += ((above >> ONE) & FIELD >= count).to(tl.uint32)
        best += (above >> (2 * ONE) >= count).to(tl.uint32)
        threshold += best * unit
    return threshold


@triton.jit
def top_places(key, count, BITS: tl.constexpr):
    """The `count` largest keys above zero, of equal ones the later: which, where, how many.

    Returns:
        mask `[N]`, the number of chosen keys before each of them `[N]`, and their total.
    """
    HALF: tl.constexpr = 16 if key.shape[0] <= 16384 else 32
    KIND: tl.constexpr = tl.int32 if key.shape[0] <= 16384 else tl.int64
    FIELD: tl.constexpr = (1 << HALF) - 1
    found = kth_largest(key, count, BITS)
    threshold = tl.maximum(found, tl.full((1,), 1, tl.uint32))
    above = key > threshold
    equal = key == threshold
    # One scan for both.
    packed = equal.to(KIND) + (above.to(KIND) << HALF)
    total = tl.sum(packed, 0)
    behind = tl.cumsum(packed, 0, reverse=True)
    room = count - (total >> HALF)
    keep = above | (equal & (behind & FIELD <= room))
    kept = (total >> HALF) + tl.minimum(total & FIELD, room)
    place = kept - (behind >> HALF) - tl.minimum(behind & FIELD, room)
    return keep, place.to(tl.int32), kept.to(tl.int32)


@triton.jit
def top_mask(key, count, BITS: tl.constexpr):
    """Mask of the `count` largest keys above zero; of equal ones the later are taken."""
    keep, _, _ = top_places(key, count, BITS)
    return keep


@triton.jit
def eviction_order(owner, last_selected, now_time):
    """As `reference.eviction_order`, as uint32: the largest goes first."""
    age = tl.minimum(now_time - last_selected, 65535).to(tl.uint32)
    late = 65535 - tl.minimum(tl.maximum(owner, 0), 65535)
    order = age * 65536 + late.to(tl.uint32)
    return tl.where(owner < 0, tl.full((1,), 4294967295, tl.uint32), order)


@triton.jit
def descending_rank(key, scratch, SP: tl.constexpr, CHUNK: tl.constexpr):
    """Rank of each of `[SP]` uint32 keys, largest first, of equal ones the earlier first.

    Compares all pairs, a chunk at a time through `scratch` `[SP]` int32: for a few hundred keys
    that is cheaper than a search.
    """
    i_s = tl.arange(0, SP)
    # Unsigned order as signed order, for the round trip through int32.
    signed = key.to(tl.int32, bitcast=True) ^ -2147483648
    tl.store(scratch + i_s, signed)
    tl.debug_barrier()
    rank = tl.zeros((SP,), tl.int32)
    # Several chunks are read at once: their loads wait side by side.
    for first in tl.range(0, SP, CHUNK, loop_unroll_factor=8):
        i_o = first + tl.arange(0, CHUNK)
        other = tl.load(scratch + i_o)
        before = (other[None, :] == signed[:, None]) & (i_o[None, :] < i_s[:, None])
        rank += tl.sum(((other[None, :] > signed[:, None]) | before).to(tl.int32), 1)
    return rank
