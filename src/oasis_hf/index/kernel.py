"""The interface of an index's kernels: how one backend writes and scans it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from ..ops import Parts, Queries, Scores


class IndexKernel(ABC):
    """The kernels of an index for one backend, named in `Index.kernels`.

    Without them an index works in torch, through `encode` and `block_logits`.

    Attributes:
        form: the index is written by the backend's own `append`, which knows it by this name (one
            of the backend's `FORMS`). None: by `Index.encode`, whose results are stored.
        writes: whether `write` does it instead.
    """

    form: ClassVar[str | None] = None
    writes: ClassVar[bool] = False

    def write(self, ops: Any, index: Any, parts: Parts, moved: Tensor) -> None:
        """Index the groups that leave the tail, with fixed shapes and without waiting.

        Args:
            ops: the backend, whose launches may be used.
            index: the `Index` whose `arrays` are written.
            parts: of the layer; `frontier.committed` counts these groups already.
            moved: `[B]` int32, how many of each sequence.
        """
        raise NotImplementedError(f"{type(self).__name__}: says `writes`, and has no `write`")

    @abstractmethod
    def scan(self, ops: Any, index: Any, parts: Parts, queries: Queries, blocks: int) -> Scores:
        """Score blocks, with fixed shapes and without waiting for the device.

        Args:
            ops: the backend, whose launches may be used.
            index: the `Index` whose `arrays` are scanned.
            parts: of the layer.
            queries: of the step; rows are combined by the mean of their shares.
            blocks: that hold tokens, rounded up; those after them need not be looked at.
        """
