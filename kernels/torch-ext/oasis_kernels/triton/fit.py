"""Whether the tensors of a launch agree with each other: checked on the host, before it.

A kernel computes addresses from the sizes that it is given. A buffer of another batch, head count,
capacity or type would be read or written past its end, which no one notices until another tensor
turns out to be changed. So each launch compares all of its tensors with what follows from one of
them. It looks at shapes only, and waits for no device.
"""

import torch
from torch import Tensor

from ..api import Scores

INT32, INT64, BYTE, FLAG = torch.int32, torch.int64, torch.uint8, torch.bool
FLOAT32 = torch.float32

Wanted = tuple[str, Tensor, tuple[int, ...], torch.dtype]
"""Name of an argument, the tensor, its shape (-1: any) and its type."""


def check(launch: str, device: torch.device, *arguments: Wanted) -> None:
    """Compare tensors with what a launch will take them for.

    Args:
        launch: name of the function, for the message.
        device: where all of them must be.
        arguments: name, tensor, expected shape (-1 for any extent) and type of each.

    Raises:
        ValueError: one of them differs, or is not contiguous; nothing was launched.
    """
    for name, tensor, shape, dtype in arguments:
        got = tensor.shape
        if (
            (got != shape and not _matches(got, shape))
            or tensor.dtype is not dtype
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            raise _unfit(launch, name, tensor, shape, dtype, device)


def unmet(launch: str, what: str) -> ValueError:
    """The error of a launch whose sizes do not have the relation that it needs."""
    return ValueError(f"{launch}: expected {what}; nothing was launched")


def _matches(got: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(got) == len(shape) and all(
        want in (-1, have) for have, want in zip(got, shape, strict=True)
    )


def _unfit(
    launch: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> ValueError:
    layout = "contiguous" if tensor.is_contiguous() else f"strides {tensor.stride()}"
    return ValueError(
        f"{launch}: {name}: got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} ({layout}),"
        f" expected {shape} {dtype} on {device} (contiguous), by the other arguments; it belongs "
        "to another batch, model or capacity, and nothing was launched"
    )


def pool_of(
    pool: tuple[Tensor, Tensor], sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[Wanted, Wanted]:
    """What a pool must be, for (batch, heads, slots, block, K dim, V dim)."""
    batch, heads, slots, block, k_dim, v_dim = sizes
    shape = (batch, heads, slots + 1, block)
    return (
        ("pool of keys", pool[0], (*shape, k_dim), dtype),
        ("pool of values", pool[1], (*shape, v_dim), dtype),
    )


def tables_of(
    tables: tuple[Tensor, Tensor, Tensor], clock: Tensor, sizes: tuple[int, int, int]
) -> tuple[Wanted, ...]:
    """What the tables of residency must be, for (batch, heads, slots)."""
    batch, heads, slots = sizes
    return (
        ("slot_of_block", tables[0], (batch, heads, -1), INT32),
        ("block_of_slot", tables[1], (batch, heads, slots + 1), INT32),
        ("last_selected", tables[2], (batch, heads, slots + 1), INT32),
        ("clock", clock, (1,), INT32),
    )


def index_of(
    index: tuple[Tensor, ...], kind: int, key: Tensor, capacity: int, group: int, block: int
) -> tuple[Wanted, ...]:
    """What the arrays of an index must be, by how the append kernel writes it."""
    batch, heads, _, dim = key.shape
    if kind == 1:
        dtype = BYTE if index[0].dtype is BYTE else key.dtype
        shape = (batch, heads, capacity + 1, dim)
        return ("low", index[0], shape, dtype), ("high", index[1], shape, dtype)
    if kind == 2:
        shape = (batch, heads, capacity * block // group + 1)
        return (
            ("codes", index[0], (*shape, group, dim // 4), BYTE),
            ("lowest", index[1], (*shape, dim), key.dtype),
            ("step", index[2], (*shape, dim), key.dtype),
        )
    return ()


def check_scores(launch: str, scores: Scores, committed: Tensor, batch: int, heads: int) -> None:
    """Compare scores with the sequences and heads that they are for."""
    pairs, rows, blocks = scores.logits.shape
    check(
        launch, scores.logits.device,
        ("logits", scores.logits, (batch * heads, rows, blocks), FLOAT32),
        ("partial", scores.partial, (pairs, -1, rows, 2), FLOAT32),
        ("positions", scores.positions, (batch, -1), INT64),
        ("committed", committed, (batch,), INT64),
    )  # fmt: skip
    if scores.chosen is not None:
        shape = (pairs, blocks // scores.per_group)
        check(launch, scores.logits.device, ("chosen", scores.chosen, shape, INT32))
