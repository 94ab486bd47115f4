"""What `compute-sanitizer` is on a GPU, for Triton's interpreter: every address is in bounds.

The interpreter computes real addresses and reads and writes there, so a kernel with a stale buffer
silently changes whatever lies next to it. Here each address is first looked up among the tensors
of its launch and the slabs of host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from oasis_hf.storage import PinnedStore


class OutOfBoundsError(AssertionError):
    """An address that belongs to no tensor of the launch."""


class _Checked:
    """The interpreter's memory operations, behind a look at their addresses."""

    def __init__(self, operations: Any) -> None:
        self._operations = operations
        self.slabs: list[weakref.ref[Tensor]] = []
        self.starts = self.ends = np.zeros(0, np.uint64)
        self.checked = 0

    def launch(self, arguments: list[Any]) -> None:
        """Allow the tensors of a launch, and the slabs that are alive."""
        slabs = [slab for ref in self.slabs if (slab := ref()) is not None]
        tensors = [x for x in [*arguments, *slabs] if isinstance(x, Tensor) and x.numel()]
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
        self.starts = np.array([start for start, _ in ranges], np.uint64)
        # Of tensors that overlap, such as a view and its base, the furthest end counts.
        self.ends = np.maximum.accumulate(np.array([end for _, end in ranges], np.uint64))

    def _check(self, what: str, addresses: Any, mask: Any, size: int) -> None:
        # A mask that was computed with others may have become a number.
        used = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)].astype(np.uint64)
        place = np.searchsorted(self.starts, used, "right") - 1
        known = place >= 0
        known[known] = used[known] + np.uint64(size) <= self.ends[place[known]]
        self.checked += used.size
        if not known.all():
            raise OutOfBoundsError(
                f"{what} of {size} bytes at {int((~known).sum())} of {used.size} addresses lies in "
                "no tensor of the launch"
            )

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check("a load", addresses, mask, np.dtype(dtype).itemsize)
        return self._operations.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        self._check("a store", addresses, mask, value.dtype.itemsize)
        return self._operations.store(addresses, value, mask)

    def atomic_rmw(self, operation: Any, addresses: Any, value: Any, mask: Any, order: Any) -> Any:
        self._check("an atomic", addresses, mask, value.dtype.itemsize)
        return self._operations.atomic_rmw(operation, addresses, value, mask, order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)


@contextmanager
def memcheck() -> Iterator[_Checked]:
    """Look at every address of every kernel that the interpreter runs in this block.

    Yields:
        An object whose `checked` is the number of addresses looked at so far.
    """
    from triton.runtime import interpreter

    operations, prepare, zeros = (
        interpreter._interpreter,
        interpreter.GridExecutor._init_args_hst,
        PinnedStore._zeros,
    )
    checked = _Checked(operations)

    def prepared(self: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = prepare(self, args, kwargs)
        checked.launch([*args, *kwargs.values()])
        return args, kwargs

    def recorded(self: Any, shape: tuple[int, ...]) -> Tensor:
        slab = zeros(self, shape)
        checked.slabs.append(weakref.ref(slab))
        return slab

    interpreter._interpreter = checked
    interpreter.GridExecutor._init_args_hst = prepared
    PinnedStore._zeros = recorded  # type: ignore[method-assign]
    try:
        yield checked
    finally:
        interpreter._interpreter = operations
        interpreter.GridExecutor._init_args_hst = prepare
        PinnedStore._zeros = zeros  # type: ignore[method-assign]
