"""Dense attention of one layer's prompts to all earlier tokens, which are read back for it."""

from torch import Tensor

from .ahead import ReadAhead
from .dense import dense_attention
from .storage import LayerStorage


class PromptLayer(LayerStorage):
    """The part of a layer that serves prompts: dense attention, which may wait for the device.

    Attributes:
        ahead: reads earlier tokens ahead of their use; shared by the layers of a cache.
        following: the offloaded layer whose attention runs next.
        is_initialized: whether the parts exist; set by the cache contract.
    """

    is_initialized: bool

    def __init__(self) -> None:
        super().__init__()
        self.ahead = ReadAhead()
        self.following: PromptLayer | None = None
        # Tokens of each sequence before the prompt in progress.
        self._before: list[int] = []

    def attend_dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        scaling: float,
        new: bool,
    ) -> Tensor:
        """Attend to all earlier tokens and to these, then store these.

        Args:
            query: `[B, Hq, T, D]`.
            key: `[B, H, T, Dk]` of the new tokens.
            value: `[B, H, T, Dv]`.
            valid: `[B, T]` bool, False for padding; None if all are real.
            scaling: factor of the logits.
            new: False where these K and V are stored already.

        Returns:
            `[B, Hq, T, Dv]`.
        """
        if new:
            self._before = list(self.settled()[0])
        if valid is None and not any(self._before):
            out = dense_attention(query, key, value, None, scaling)
        else:
            out = self._by_sequence(query, key, value, valid, scaling, new)
        if new:
            self.extend(key, value, valid)
        return out

    def _by_sequence(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        scaling: float,
        new: bool,
    ) -> Tensor:
        """Attend to all earlier tokens, one sequence at a time and without its padding."""
        out = query.new_zeros(*query.shape[:3], value.shape[-1])
        for row, old in enumerate(self._before):
            q, k, v = query[row : row + 1], key[row : row + 1], value[row : row + 1]
            real = None if valid is None else valid[row]
            if real is not None:
                asked = real[-q.shape[2] :]
                q, k, v = q[:, :, asked], k[:, :, real], v[:, :, real]
            rows = k.shape[2]
            if not q.shape[2]:
                continue
            if old:
                all_k, all_v = self.ahead.take(self, row, old, rows)
                if valid is None and new:
                    self._ask_next(row)
                all_k[:, :, old:], all_v[:, :, old:] = k, v
                k, v = all_k, all_v
            found = dense_attention(q, k, v, None, scaling)
            if real is None:
                out[row : row + 1] = found
            else:
                out[row : row + 1, :, asked] = found
        return out

    def _ask_next(self, row: int) -> None:
        """Have the next sequence's tokens, or the next layer's, come while this is attended to."""
        before, after = self._before, self.following
        if row + 1 < len(before):
            self.ahead.start(self, row + 1, before[row + 1])
        elif after is not None and after.is_initialized and after.device == self.device:
            self.ahead.start(after, 0, before[0])
