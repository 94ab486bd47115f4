"""Pure arithmetic of blocks, groups, slots and bytes. No tensors."""

from dataclasses import dataclass

GROWTH_TOKENS = 4096
"""Tokens by which the full store and the index grow once the prompt's capacity is used up."""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Smallest multiple of b not below a."""
    return ceil_div(a, b) * b


def capped_blocks(share: float | None, budget_blocks: int) -> int:
    """Blocks that a share of the budget admits: at least one, none for 0, all for None."""
    if share is None:
        return budget_blocks
    return max(1, round(share * budget_blocks)) if share else 0


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
        budget_blocks: K, blocks attended to per KV head.
        slots: S, resident blocks per KV head.
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
        budget: int,
        head_room: float,
        recent: int,
        rows: int,
    ) -> "LayerGeometry":
        """Derive slots and ring from the user's choices.

        The ring must hold the recent window, an index group that is not full yet and the rows of
        one step; a multiple of the group, so that a group never wraps inside it.
        """
        budget_blocks = budget // block
        return cls(
            kv_heads=kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            itemsize=itemsize,
            block=block,
            group=group,
            budget_blocks=budget_blocks,
            slots=max(budget_blocks, round(budget_blocks * head_room)),
            ring=round_up(recent + group - 1 + rows, group),
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

    def store_bytes(self, batch: int, blocks: int) -> int:
        """Bytes of `blocks` blocks of capacity in the full store."""
        return batch * self.kv_heads * blocks * self.block_bytes

    def fast_bytes(self, batch: int) -> int:
        """Bytes of the resident pool and the tail, spill places included."""
        tokens = (self.slots + 1) * self.block + self.ring + 1
        return batch * tokens * self.token_bytes
