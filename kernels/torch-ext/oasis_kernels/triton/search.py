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
def kth_largest(key, count, DIGIT_BITS: tl.constexpr):
    """The largest t with at least `count` keys >= t; 0 if there are fewer keys above zero.

    Args:
        key: `[N]` uint32.
        count: scalar, at least 1.
        DIGIT_BITS: bits decided per pass; more bits cost registers, fewer cost passes.
    """
    threshold = tl.full((1,), 0, tl.uint32)
    digit = tl.arange(0, 2**DIGIT_BITS).to(tl.uint32)
    for step in tl.static_range(32 // DIGIT_BITS):
        shift = 32 - DIGIT_BITS * (step + 1)
        candidate = threshold + (digit << shift)
        above = tl.sum((key[:, None] >= candidate[None, :]).to(tl.int32), 0)
        best = tl.maximum(tl.sum((above >= count).to(tl.int32)) - 1, 0)
        threshold = threshold + (best.to(tl.uint32) << shift)
    return threshold


@triton.jit
def top_mask(key, count, DIGIT_BITS: tl.constexpr):
    """Mask of the `count` largest keys above zero; of equal ones the later are taken."""
    threshold = tl.maximum(kth_largest(key, count, DIGIT_BITS), tl.full((1,), 1, tl.uint32))
    above = key > threshold
    equal = key == threshold
    room = count - tl.sum(above.to(tl.int32))
    behind = tl.cumsum(equal.to(tl.int32), 0, reverse=True)
    return above | (equal & (behind <= room))


@triton.jit
def eviction_order(owner, last_selected, now_time):
    """As `reference.eviction_order`, uint32: the largest goes first."""
    age = tl.minimum(now_time - last_selected, 65535).to(tl.uint32)
    late = 65535 - tl.minimum(tl.maximum(owner, 0), 65535)
    order = age * 65536 + late.to(tl.uint32)
    return tl.where(owner < 0, tl.full((1,), 4294967295, tl.uint32), order)
