"""Threshold search inside one program: the k-th largest of many keys without sorting them."""

import triton
import triton.language as tl


@triton.jit
def ordered_key(x):
    """Map float32 to uint32 so that the order is kept; -inf becomes small but not zero."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def share_key(x):
    """Map float32 >= 0, already truncated to its upper 16 bits, to 1 .. 2**16 - 1."""
    return ((x.to(tl.int32, bitcast=True) >> 16) + 1).to(tl.uint32)


@triton.jit
def truncate_share(x):
    """As `reference.truncate_share`."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(key, count, BITS: tl.constexpr, DIGIT_BITS: tl.constexpr):
    """The largest t with at least `count` keys >= t; 0 if there are fewer keys above zero.

    Args:
        key: `[N]` uint32 below 2**BITS.
        count: scalar, at least 1.
        BITS: bits that are searched, a multiple of DIGIT_BITS.
        DIGIT_BITS: bits decided per pass; more bits cost registers, fewer cost passes.
    """
    threshold = tl.full((1,), 0, tl.uint32)
    digit = tl.arange(0, 2**DIGIT_BITS).to(tl.uint32)
    for step in tl.static_range(BITS // DIGIT_BITS):
        shift = BITS - DIGIT_BITS * (step + 1)
        candidate = threshold + (digit << shift)
        above = tl.sum((key[:, None] >= candidate[None, :]).to(tl.int32), 0)
        best = tl.maximum(tl.sum((above >= count).to(tl.int32)) - 1, 0)
        threshold = threshold + (best.to(tl.uint32) << shift)
    return threshold


@triton.jit
def top_mask(key, count, BITS: tl.constexpr, DIGIT_BITS: tl.constexpr):
    """Mask of the `count` largest keys above zero; of equal ones the later are taken."""
    found = kth_largest(key, count, BITS, DIGIT_BITS)
    threshold = tl.maximum(found, tl.full((1,), 1, tl.uint32))
    above = key > threshold
    equal = key == threshold
    room = count - tl.sum(above.to(tl.int32))
    behind = tl.cumsum(equal.to(tl.int32), 0, reverse=True)
    return above | (equal & (behind <= room))


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
    for first in range(0, SP, CHUNK):
        i_o = first + tl.arange(0, CHUNK)
        other = tl.load(scratch + i_o)
        before = (other[None, :] == signed[:, None]) & (i_o[None, :] < i_s[:, None])
        rank += tl.sum(((other[None, :] > signed[:, None]) | before).to(tl.int32), 1)
    return rank
