"""The file of a saved cache: one safetensors file that is whole, ours and unchanged, or refused."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .checksum import checksum

FORMAT = "oasis-hf-cache/2"
EARLIER = ("oasis-hf-cache/1",)
"""Formats that are refused: their record of the model is too small to tell models apart."""

OFFLOADED, DENSE, NATIVE = "offloaded", "dense", "native"


class SavedCacheError(ValueError):
    """A saved cache that does not fit; nothing was loaded."""


@dataclass(frozen=True)
class Saved:
    """Contents of a file.

    Attributes:
        model: description of the model's config (`identity.describe`).
        fingerprint: of the model, as text; empty for a cache that was built from a config.
        options: of the cache.
        columns: tokens given, padding included.
        layers: kind of every layer that holds anything, by its number.
        tensors: `N.k` and `N.v` `[B, H, L, D]` of layer N, `N.lengths` `[B]` of offloaded ones and
            `N.index.*`, what their index learned, and of the ledger `real` and `ids`
            `[B, columns]`, where it has them.
        transformers: version that wrote it.
    """

    model: dict[str, Any]
    fingerprint: str
    options: dict[str, Any]
    columns: int
    layers: dict[int, str]
    tensors: dict[str, Tensor]
    transformers: str = transformers.__version__

    @property
    def batch(self) -> int:
        """Sequences; 1 if nothing is held."""
        return next((x.shape[0] for x in self.tensors.values() if x.ndim), 1)


def write(saved: Saved, path: str | Path) -> None:
    """Write a file; one that is there already is replaced as a whole, once the new one is.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"save: got {path}, expected a path in a folder that exists; create {path.parent} first"
        )
    header = {
        "format": FORMAT,
        "model": json.dumps(saved.model),
        "fingerprint": saved.fingerprint,
        "options": json.dumps(saved.options),
        "columns": str(saved.columns),
        "layers": json.dumps(saved.layers),
        "transformers": saved.transformers,
        "torch": torch.__version__,
    }
    header["seal"] = _seal(header, saved.tensors)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        save_file(saved.tensors, str(part), metadata=header)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _seal(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """A digest of everything in a file but itself."""
    lines = [json.dumps({k: x for k, x in header.items() if k != "seal"}, sort_keys=True)]
    for name, tensor in sorted(tensors.items()):
        number = int(checksum(tensor)) if tensor.numel() else 0
        lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {number}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class SavedFile:
    """A file that is being read: first what it says of itself, then what it holds.

    Raises:
        SavedCacheError: it is not a file of this format, or not whole.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        try:
            with safe_open(str(path), framework="pt") as file:
                self._header: dict[str, str] = file.metadata() or {}
        except SafetensorError as error:
            raise SavedCacheError(
                f"saved cache: got a file that is not safetensors ({error}), expected one written "
                f"by OasisCache.save; check {path}"
            ) from error
        found = self._header.get("format")
        if found in EARLIER:
            raise SavedCacheError(
                f"saved cache: got format {found!r}, expected {FORMAT!r}; {path} was written by an "
                "earlier version, which noted too little of the model to tell whether it is still "
                "the same; read the prompt again and save it"
            )
        if found != FORMAT:
            raise SavedCacheError(
                f"saved cache: got format {found!r}, expected {FORMAT!r}; {path} was not written "
                "by OasisCache.save of this version"
            )
        try:
            self.head = Saved(
                model={k: dict(x) for k, x in json.loads(self._header["model"]).items()},
                fingerprint=self._header["fingerprint"],
                options=dict(json.loads(self._header["options"])),
                columns=int(self._header["columns"]),
                layers={int(k): str(x) for k, x in json.loads(self._header["layers"]).items()},
                tensors={},
                transformers=self._header["transformers"],
            )
            self._header["seal"]
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise self._damaged(
                f"a header that cannot be read ({error!r})", "a whole one"
            ) from None

    def _damaged(self, got: str, expected: str) -> SavedCacheError:
        return SavedCacheError(
            f"saved cache: got {got}, expected {expected}; {self._path} is damaged or was changed "
            "after OasisCache.save wrote it, read the prompt again and save it"
        )

    def dtype(self) -> torch.dtype | None:
        """Of the K of the first layer that is offloaded or dense; None if nothing is held."""
        ours = [number for number, kind in self.head.layers.items() if kind != NATIVE]
        if not ours:
            return None
        with safe_open(str(self._path), framework="pt") as file:
            name = f"{min(ours)}.k"
            if name not in file.keys():  # noqa: SIM118
                return None
            # Of no bytes: only the header is read.
            return file.get_slice(name)[:0].dtype

    def read(self) -> Saved:
        """All contents, checked.

        Raises:
            SavedCacheError: tensors are missing, have other shapes than they must have, or are not
                what was written.
        """
        head = self.head
        with safe_open(str(self._path), framework="pt") as file:
            names = set(file.keys())
            tensors = {name: file.get_tensor(name) for name in sorted(names)}
        wanted = {f"{n}.{part}" for n in head.layers for part in "kv"}
        wanted |= {f"{n}.lengths" for n, kind in head.layers.items() if kind == OFFLOADED}
        learned = {x for x in names for n in head.layers if x.startswith(f"{n}.index.")}
        missing = sorted(wanted - names)
        strange = sorted(names - wanted - learned - {"real", "ids"})
        if missing or strange:
            got = f"no tensor {missing[0]}" if missing else f"a tensor {strange[0]}"
            raise self._damaged(got, f"{len(wanted)} of {len(head.layers)} layers")
        saved = Saved(**{**vars(head), "tensors": tensors})
        wrong = misfit(saved)
        if wrong is not None:
            raise self._damaged(*wrong)
        if _seal(self._header, tensors) != self._header["seal"]:
            raise self._damaged("contents with another checksum", "those that were written")
        return saved


def misfit(saved: Saved) -> tuple[str, str] | None:
    """The first tensor that does not fit the others: what it is, and what it must be; or None."""
    tensors, columns, batch = saved.tensors, saved.columns, saved.batch
    if columns < 0 or (columns > 0) != bool(saved.layers):
        return f"{columns} columns in {len(saved.layers)} layers", "columns in every layer, or none"
    for name, dtype in (("real", torch.bool), ("ids", torch.int32)):
        flags = tensors.get(name)
        if flags is not None and (flags.shape != (batch, columns) or flags.dtype != dtype):
            return _shown(name, flags), f"{dtype} of shape {(batch, columns)}"
    real = tensors.get("real")
    given = torch.full((batch,), columns) if real is None else real.sum(1)
    for number, kind in saved.layers.items():
        k, v = tensors[f"{number}.k"], tensors[f"{number}.v"]
        most = columns
        if kind == OFFLOADED:
            lengths = tensors[f"{number}.lengths"]
            if lengths.dtype != torch.long or not torch.equal(lengths, given):
                return _shown(f"{number}.lengths", lengths), f"the tokens given, {given.tolist()}"
            most = int(given.max())
        for name, tensor in ((f"{number}.k", k), (f"{number}.v", v)):
            fits = (
                tensor.ndim == 4
                and tensor.is_floating_point()
                and tensor.dtype == k.dtype
                and tensor.shape[:3] == k.shape[:3]
                and tensor.shape[0] == batch
                and (tensor.shape[2] <= most if kind == NATIVE else tensor.shape[2] == most)
                and min(tensor.shape[1], tensor.shape[3]) > 0
            )
            if not fits:
                shape = f"[{batch}, heads, {most}, head_dim]"
                return _shown(name, tensor), f"floating-point numbers of shape {shape}"
    return None


def _shown(name: str, tensor: Tensor) -> str:
    return f"tensor {name} of {tensor.dtype} and shape {tuple(tensor.shape)}"
