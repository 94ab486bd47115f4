"""Dense attention of one layer's prompts to all earlier tokens, which are read back for it."""

from __future__ import annotations

from torch import Tensor

from ..storage.parts import LayerParts
from .dense import dense_attention
from .inputs import AttentionInputs
from .read_ahead import ReadAhead


class PromptAttention:
    """Attends densely over one layer; may wait for the device.

    Attributes:
        ahead: reads earlier tokens ahead of their use; shared by the layers of a cache.
    """

    def __init__(self, ahead: ReadAhead) -> None:
        self.ahead = ahead
        # Tokens of each sequence before the prompt in progress.
        self._before: list[int] = []

    def forget(self) -> None:
        """Forget the prompt in progress, and what was asked for."""
        self._before = []
        self.ahead.clear()

    def attend(
        self, parts: LayerParts, inputs: AttentionInputs, following: LayerParts | None
    ) -> Tensor:
        """Attend to all earlier tokens and to these, which are not stored here.

        Args:
            parts: of the layer.
            inputs: of the forward.
            following: parts of the layer whose attention runs next.

        Returns:
            `[B, Hq, T, Dv]`.
        """
        if inputs.new:
            self._before = list(parts.frontier.settled()[0])
        if inputs.valid is None and not any(self._before):
            return dense_attention(
                inputs.query, inputs.key, inputs.value, None, inputs.spec.scaling
            )
        return self._by_sequence(parts, inputs, following)

    def _by_sequence(
        self, parts: LayerParts, inputs: AttentionInputs, following: LayerParts | None
    ) -> Tensor:
        """Attend to all earlier tokens, one sequence at a time and without its padding."""
        query, valid = inputs.query, inputs.valid
        out = query.new_zeros(*query.shape[:3], inputs.value.shape[-1])
        for row, old in enumerate(self._before):
            one = slice(row, row + 1)
            q, k, v = query[one], inputs.key[one], inputs.value[one]
            asked: Tensor | slice = slice(None)
            if valid is not None:
                real = valid[row]
                asked = real[-q.shape[2] :]
                q, k, v = q[:, :, asked], k[:, :, real], v[:, :, real]
            if not q.shape[2]:
                continue
            if old:
                all_k, all_v = self.ahead.take(parts, row, old, k.shape[2])
                if valid is None and inputs.new:
                    self._ask_next(parts, row, following)
                all_k[:, :, old:], all_v[:, :, old:] = k, v
                k, v = all_k, all_v
            out[one, :, asked] = dense_attention(q, k, v, None, inputs.spec.scaling)
        return out

    def _ask_next(self, parts: LayerParts, row: int, following: LayerParts | None) -> None:
        """Have the next sequence's tokens, or the next layer's, come while this is attended to."""
        before = self._before
        if row + 1 < len(before):
            self.ahead.start(parts, row + 1, before[row + 1])
        elif following is not None and following.device == parts.device:
            self.ahead.start(following, 0, before[0])
