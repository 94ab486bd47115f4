"""What one forward of a model does with a cache: decided once, before its first layer.

Everything that a layer, the attention or a graph must know of the forward in progress is in one
`Forward`; nothing else says what kind of forward it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Kind(Enum):
    """How the new tokens are attended to."""

    PROMPT = "prompt"
    """Densely; may wait for the device."""
    DECODE = "decode"
    """Sparsely: one token of each sequence."""
    VERIFY = "verify"
    """Sparsely: a token and drafts after it, of which some may be taken back."""


class Drafting(Enum):
    """What the calls of several tokens to come are."""

    OFF = "off"
    """Prompts."""
    ANNOUNCED = "announced"
    """A prompt, with the first drafts after it perhaps; then verifications."""
    ON = "on"
    """Verifications."""


@dataclass(frozen=True)
class Hint:
    """What the caller of the next forward knows of it.

    Attributes:
        prompt: whether it is a prompt, however short.
        agreed: whether its mask certainly says of earlier columns what was recorded.
    """

    prompt: bool = False
    agreed: bool = False


@dataclass(frozen=True)
class Forward:
    """One forward.

    Attributes:
        kind: how its tokens are attended to.
        start: columns that the cache holds before it.
        rows: new columns.
        drafts: of a prompt, newest columns that are drafts, verified one after the other.
        drafting: whether tokens of it may be taken back.
        ids: `[B, rows]` token ids, or None if they are not known.
        agreed: whether its mask certainly says of earlier columns what was recorded.
        recorded: whether its columns are recorded already, by the owner of the CUDA graph that it
            runs in.
        real: then `[B, rows]` bool of its columns, or None if all are real.
    """

    kind: Kind
    start: int
    rows: int
    drafts: int = 0
    drafting: bool = False
    ids: Tensor | None = None
    agreed: bool = False
    recorded: bool = False
    real: Tensor | None = None

    @property
    def dense(self) -> bool:
        """Whether its tokens are a prompt."""
        return self.kind is Kind.PROMPT


def describe(
    start: int,
    rows: int,
    drafting: Drafting,
    *,
    max_rows: int,
    exact: bool,
    hint: Hint = Hint(),
    keep: int = 0,
    ids: Tensor | None = None,
) -> Forward:
    """What a forward is.

    Args:
        start: columns that the cache holds.
        rows: new columns.
        drafting: what calls of several tokens are.
        max_rows: most columns of a verification.
        exact: whether the rows of a verification choose one after the other.
        hint: what its caller says of it.
        keep: newest columns whose logits are wanted; 0 for all, or if that is not known.
        ids: `[B, rows]` token ids, if they are known.
    """
    drafts = max(keep - 1, 0) if exact and drafting is Drafting.ANNOUNCED else 0
    # Logits of the last token alone: nobody verifies drafts with these.
    prompt = hint.prompt or (rows > 1 and keep == 1)
    verify = (
        drafting is Drafting.ON and not prompt and start > 0 and rows <= max_rows
        # The last token of a prompt, alone before its drafts, is a step like any other.
    ) or (drafts > 0 and rows - drafts == 1 and start > 0)
    kind = Kind.VERIFY if verify else Kind.PROMPT if rows > 1 else Kind.DECODE
    return Forward(
        kind=kind,
        start=start,
        rows=rows,
        drafts=drafts if kind is Kind.PROMPT else 0,
        drafting=drafting is not Drafting.OFF,
        ids=ids,
        agreed=hint.agreed,
    )
