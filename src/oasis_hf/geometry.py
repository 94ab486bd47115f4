"""Pure arithmetic of blocks, groups, slots and bytes. No tensors."""

from dataclasses import dataclass

GROWTH_TOKENS = 4096
"""Tokens by which the full store and the index grow once the prompt's capacity is used up."""
ALL_TOKENS = 1 << 30
"""More tokens than any sequence has: a budget without a bound."""
LEAST_TOKENS = 256
"""Fewest tokens that the store and the resident pool have room for, once they hold any."""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Smallest multiple of b not below a."""
    return ceil_div(a, b) * b


def roomy(tokens: int) -> int:
    """Capacity for so many tokens of a part that grows with the context.

    A power of two, and beyond the steps by which the store grows one of them or a quarter of a
    power of two: it changes rarely, and where the other sizes do on which graphs depend.
    """
    tokens = max(tokens, LEAST_TOKENS)
    power = 1 << (tokens - 1).bit_length()
    if tokens <= GROWTH_TOKENS:
        return power
    return round_up(tokens, max(GROWTH_TOKENS, power // 8))


def capped_blocks(share: float | None, budget_blocks: int) -> int:
    """Blocks that a share of the budget admits: at least one, none for 0, all for None."""
    if share is None:
        return budget_blocks
    return max(1, round(share * budget_blocks)) if share else 0


def budgeted_blocks(budget: int | None, block: int) -> int:
    """Blocks of a budget in tokens, rounded up; more than any context has for None."""
    return ceil_div(ALL_TOKENS if budget is None else budget, block)


def blocks_beside(link: float, seconds: float, bytes_each: int, budget_blocks: int) -> int:
    """Blocks per head that a link brings beside one step: at least one, at most the budget's.

    Args:
        link: bytes per second.
        seconds: of the step.
        bytes_each: bytes of one block for every head, sequence and layer that fetches over it.
        budget_blocks: K.
    """
    return max(1, min(int(link * seconds / bytes_each), budget_blocks))


@dataclass(frozen=True)
class LayerGeometry:
    """Sizes of one layer's parts.

    Attributes:
        kv_heads: local KV heads H.
        k_dim: head dimension of keys.
        v_dim: head dimension of values.
        itemsize: bytes per element of K and V.
        block: tokens per block b.
        group: tokens per index group g, a multiple of b.
        budget_blocks: K, blocks attended to per KV head, where there are as many.
        slots: S, resident blocks per KV head, where there are as many.
        ring: places R of the tail.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int
    block: int
    group: int
    budget_blocks: int
    slots: int
    ring: int

    @classmethod
    def plan(
        cls,
        *,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        itemsize: int,
        block: int,
        group: int,
        budget: int | None,
        head_room: float,
        recent: int,
        rows: int,
    ) -> "LayerGeometry":
        """Derive slots and ring from the user's choices; a budget is rounded up to whole blocks.

        The ring must hold the recent window, an index group that leaves with the next step, and the
        rows of one step, as all of them may be taken back; a multiple of the group, so that a group
        never wraps inside it.
        """
        budget_blocks = budgeted_blocks(budget, block)
        return cls(
            kv_heads=kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            itemsize=itemsize,
            block=block,
            group=group,
            budget_blocks=budget_blocks,
            slots=max(budget_blocks, round(budget_blocks * head_room)),
            ring=round_up(recent + group + rows, group),
        )

    @property
    def row(self) -> int:
        """Elements of one stored block: its keys, then its values."""
        return self.block * (self.k_dim + self.v_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one stored block of one head."""
        return self.row * self.itemsize

    @property
    def attended_bytes(self) -> int:
        """Bytes of K and V that a step of one sequence attends to: the budget and the tail."""
        return (self.budget_blocks * self.block + self.ring) * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all heads of the layer."""
        return self.kv_heads * (self.k_dim + self.v_dim) * self.itemsize

    def slots_for(self, blocks: int) -> int:
        """Slots for a context of so many blocks: no more than there are blocks, in rare steps."""
        return min(self.slots, ceil_div(roomy(blocks * self.block), self.block))

    def attended_after(self, tokens: int) -> int:
        """`attended_bytes` of a sequence of `tokens` tokens, which may be fewer than the budget."""
        spare = max(0, self.budget_blocks * self.block - tokens)
        return self.attended_bytes - spare * self.token_bytes

    def store_bytes(self, batch: int, blocks: int) -> int:
        """Bytes of `blocks` blocks of capacity in the full store."""
        return batch * self.kv_heads * blocks * self.block_bytes

    def fast_bytes(self, batch: int, slots: int | None = None) -> int:
        """Bytes of the resident pool and the tail, spill places included.

        Args:
            batch: sequences.
            slots: of the pool; by default all that it may have.
        """
        tokens = ((self.slots if slots is None else slots) + 1) * self.block + self.ring + 1
        return batch * tokens * self.token_bytes
