"""What of a model decides its K and V, in a few numbers: weights, rotary embedding, adapters.

Every weight counts, by an exact checksum of its bytes taken where it is. That reads each weight
once, as a forward does, wherever `device_map` put it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..facts.adapters import Adapters, adapter_state
from .checksum import checksum
from .placement import stored_weight

ROPE_TOLERANCE = 1e-5
"""Relative difference of two frequencies that are one: devices round powers differently."""


@dataclass(frozen=True)
class Fingerprint:
    """A model, as far as its K and V go.

    Attributes:
        dtype: of its weights.
        weights: digest of all weights under their names.
        contents: digest of the same without names, which may change with Transformers.
        rope: inverse frequencies and scalings of rotary embeddings, by name of the module's buffer.
        adapters: digest of which adapters are in effect where, and how much.
        adapter_names: their names.
    """

    dtype: str
    weights: str
    contents: str
    rope: dict[str, list[float]]
    adapters: str
    adapter_names: list[str]

    def as_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """From text; what is missing or superfluous raises a TypeError or KeyError."""
        found = json.loads(text)
        return cls(**{field.name: found[field.name] for field in fields(cls)})

    def same_rope(self, other: Fingerprint) -> bool:
        """Whether rotary embeddings that both have are alike."""
        return all(
            len(values) == len(other.rope[name])
            and all(
                abs(a - b) <= ROPE_TOLERANCE * max(abs(a), abs(b))
                for a, b in zip(values, other.rope[name], strict=True)
            )
            for name, values in self.rope.items()
            if name in other.rope
        )


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """What of `model` decides its K and V, in addition to its config; waits for its devices."""
    adapters = Adapters(model)
    summed = _checksums(_weights(model, adapters))
    return Fingerprint(
        dtype=str(getattr(model, "dtype", None)),
        weights=_digest(sorted(f"{name}: {value}" for name, value in summed)),
        contents=_digest(sorted(value for _, value in summed)),
        rope=_rope(model, adapters),
        adapters=_digest(adapters.summary()),
        adapter_names=adapters.names(),
    )


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""


def _weights(model: torch.nn.Module, adapters: Adapters) -> Iterator[tuple[str, Any]]:
    """Names and contents of all that a state dict has: parameters, buffers, states of quantisers.

    A state dict is what libraries agree on: it holds the scales of a quantised weight wherever the
    library keeps them, and the same before and after the first forward.
    """
    for name, value in model.state_dict().items():
        plain = adapters.plain_name(name)
        if plain is None:
            continue
        if isinstance(value, Tensor) and value.is_meta:
            kept = stored_weight(model, name)
            yield plain, value if kept is None else kept
            continue
        yield plain, value


def _checksums(weights: Iterator[tuple[str, Any]]) -> list[tuple[str, str]]:
    """For each weight a text that is equal where its kind and contents are."""
    found: list[tuple[str, str]] = []
    sums: dict[torch.device, list[Tensor]] = {}
    places: list[tuple[torch.device, int] | None] = []
    for name, value in weights:
        for path, part in _parts(value):
            if isinstance(part, Tensor) and not part.is_meta and part.numel():
                here = sums.setdefault(part.device, [])
                places.append((part.device, len(here)))
                here.append(checksum(part))
            else:
                places.append(None)
            kind = f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else repr(part)
            found.append((name, f"{path} {kind}"))
    # One wait for each device, not for each weight.
    numbers = {device: torch.stack(values).tolist() for device, values in sums.items()}
    return [
        (name, kind if place is None else f"{kind} {numbers[place[0]][place[1]]}")
        for (name, kind), place in zip(found, places, strict=True)
    ]


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The plain tensors and values that something in a state dict is made of."""
    if isinstance(value, Tensor):
        inner = _inner(value)
        if inner:
            for name in inner:
                yield from _parts(getattr(value, name), f"{path}.{name}")
        else:
            yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _parts(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _parts(part, f"{path}.{number}")
    elif isinstance(value, str | bytes | int | float | bool | torch.dtype | torch.Size | None):
        yield path, value
    else:
        # Its address, which `repr` may show, says nothing.
        yield path, type(value).__qualname__


def _inner(tensor: Tensor) -> list[str]:
    """Names of the tensors within one of a class of its own: quantised, or a shard of a larger one.

    Of a distributed tensor that is what this process holds.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        return list(tensor.__tensor_flatten__()[0])
    # A parameter that is partitioned between processes is empty itself.
    return ["ds_tensor"] if isinstance(getattr(tensor, "ds_tensor", None), Tensor) else []


def _rope(model: torch.nn.Module, adapters: Adapters) -> dict[str, list[float]]:
    """Frequencies and scalings of rotary embeddings, which are not weights, as they began.

    Some embeddings change their frequencies with the length of a text.
    """
    found: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        for buffer, value in own.items():
            kind, _, rest = buffer.rpartition("inv_freq")
            if rest or "original_" in kind or "long_" in kind or value.is_meta:
                continue
            first = own.get(f"{kind}original_inv_freq")
            if first is not None and _changes(module, kind.rstrip("_")):
                value = first
            plain = adapters.plain_name(f"{name}.{buffer}")
            found[plain or buffer] = value.detach().flatten().double().tolist()
            scaling = vars(module).get(f"{kind}attention_scaling")
            if isinstance(scaling, int | float):
                found[f"{plain or buffer}.attention_scaling"] = [float(scaling)]
    return found


def _changes(module: Any, kind: str) -> bool:
    """Whether a rotary embedding changes its frequencies with the length of a text."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):
        rope_type = rope_type.get(kind)
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


__all__ = ["Fingerprint", "adapter_state", "fingerprint"]
