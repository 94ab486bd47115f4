"""What is kept of a real generation: every layer's keys, and the queries of every row."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

ANOTHER = "remove it, or name another folder"


@dataclass(frozen=True)
class Run:
    """R rounds of one generation of L layers, of up to T rows each.

    Attributes:
        query: `[L, R, Hq, T, D]` queries as attention sees them, not scaled; zeros where no row is.
        key: `[L, R, H, T, D]` keys of the same rows.
        peek: `[L, R, Hq, T, D]` queries that a layer's projection makes of the hidden state before
            the previous layer; zeros in the first layer.
        start: `[R]` tokens in the cache before the round.
        rows: `[R]` verified rows.
        accepted: `[R]` last accepted row.
        probes: `[R]` rows beyond, fed to look ahead.
        match: `[R]` as in `oasis_hf.lookahead.Rounds`.
    """

    query: Tensor
    key: Tensor
    peek: Tensor
    start: Tensor
    rows: Tensor
    accepted: Tensor
    probes: Tensor
    match: Tensor

    @property
    def tokens(self) -> int:
        """Tokens committed in all rounds."""
        return int((self.accepted + 1).sum())

    @property
    def acceptance(self) -> float:
        """Share of the drafts that was accepted; 0 without drafts."""
        return int(self.accepted.sum()) / max(1, int((self.rows - 1).sum()))


@dataclass(frozen=True)
class Recording:
    """One text, read once, and generations from there.

    Attributes:
        keys: `[L, H, C, D]` keys of the context.
        values: `[L, H, C, D]` its values, from which further runs can start.
        scaling: factor of the logits.
        about: where and with what it was made; plain values.
        runs: generations by name.
    """

    keys: Tensor
    values: Tensor
    scaling: float
    about: dict[str, Any]
    runs: dict[str, Run] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write one safetensors file; an interrupted write leaves no file."""
        tensors = {"keys": self.keys.contiguous(), "values": self.values.contiguous()}
        for name, run in self.runs.items():
            for part in fields(Run):
                tensors[f"{name}/{part.name}"] = getattr(run, part.name).contiguous()
        about = json.dumps({"scaling": self.scaling, "about": self.about})
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".part")
        save_file(tensors, scratch, metadata={"lookahead": about})
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is something else.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); {ANOTHER}") from error
        if "lookahead" not in metadata:
            raise ValueError(f"{path}: got another kind of file, expected a recording; {ANOTHER}")
        try:
            keys, values = tensors.pop("keys"), tensors.pop("values")
            parts: dict[str, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                run, part = name.rsplit("/", 1)
                parts.setdefault(run, {})[part] = tensor
            runs = {name: Run(**found) for name, found in parts.items()}
            return cls(keys=keys, values=values, runs=runs, **json.loads(metadata["lookahead"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: got a recording of another release; {ANOTHER}") from error


def stack_rounds(rounds: list[Tensor]) -> Tensor:
    """Pad `[L, heads, t, D]` of each round to the longest: `[L, R, heads, T, D]`."""
    width = max(part.shape[2] for part in rounds)
    padded = [torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[2])) for part in rounds]
    return torch.stack(padded, 1)
