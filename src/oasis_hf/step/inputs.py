"""What the attention of one layer is given."""

from dataclasses import dataclass, replace

from torch import Tensor

from ..ops import AttentionSpec


@dataclass(frozen=True)
class AttentionInputs:
    """The new tokens of one layer in one forward.

    Attributes:
        query: `[B, Hq, T, D]`.
        key: `[B, H, T, Dk]`.
        value: `[B, H, T, Dv]`.
        valid: `[B, T]` bool, False for padding; None if all are real.
        spec: what the attention is.
        new: False where another model layer shares these K and V and they are stored already; the
            query may then be of the last rows only.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None
    spec: AttentionSpec
    new: bool = True

    @property
    def rows(self) -> int:
        """T, of the keys."""
        return self.key.shape[2]

    def split(self, first: int) -> "tuple[AttentionInputs, AttentionInputs]":
        """The first rows, and those after them."""
        return self.part(slice(0, first)), self.part(slice(first, None))

    def part(self, rows: slice) -> "AttentionInputs":
        """Some of the rows."""
        valid = None if self.valid is None else self.valid[:, rows]
        states = (x[:, :, rows] for x in (self.query, self.key, self.value))
        query, key, value = states
        return replace(self, query=query, key=key, value=value, valid=valid)
