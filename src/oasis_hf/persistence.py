"""Saving, loading and forking a cache: the full KV travels, everything else is derived again."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from . import compat
from .handle import OasisUnsupportedError
from .index import INDEXES
from .layer import OasisLayer
from .native import DenseLayer

if TYPE_CHECKING:
    from .cache import OasisCache

FORMAT = "oasis-hf-cache/1"
SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
)
"""Config fields that two models must share to share a cache."""


class SavedCacheError(ValueError):
    """A saved cache that does not fit; nothing was loaded."""


def fingerprint(model: torch.nn.Module | None) -> str:
    """A short hash of some weights, to tell fine-tuned siblings apart; empty without a model."""
    if model is None:
        return ""
    digest = hashlib.sha256()
    parameters = list(model.parameters())
    for parameter in (parameters[0], parameters[len(parameters) // 2], parameters[-1]):
        head = parameter.detach().flatten()[:4096].float().cpu()
        digest.update(head.numpy().tobytes())
    return digest.hexdigest()[:16]


def _identity(model_config: PreTrainedConfig) -> dict[str, Any]:
    config = compat.text_config(model_config)
    return {name: getattr(config, name, None) for name in SHAPE}


def save(cache: OasisCache, path: str | Path) -> None:
    """Write the cache to one safetensors file."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {"columns": cache.ledger.columns}
    for number, layer in enumerate(cache.layers):
        if compat.is_placeholder(layer):
            continue
        if compat.is_linear(layer):
            raise OasisUnsupportedError(
                f"save: layer {number} holds recurrent state, which this format does not cover; "
                "cache.fork() copies it in memory"
            )
        if not layer.is_initialized:
            continue
        if isinstance(layer, OasisLayer):
            lengths = layer.lengths.tolist()
            k, v, _ = layer.history(lengths)
            tensors[f"{number}.lengths"] = layer.lengths.cpu()
        else:
            k, v = layer.keys, layer.values
            numbers[f"{number}.seen"] = int(layer.get_seq_length())
        tensors[f"{number}.k"], tensors[f"{number}.v"] = (t.cpu().contiguous() for t in (k, v))
    real = cache.ledger.real()
    if real is not None:
        tensors["real"] = real.cpu().contiguous()
    header = {
        "format": FORMAT,
        "model": json.dumps(_identity(cache.model_config)),
        "fingerprint": fingerprint(cache.model),
        "options": json.dumps(cache.oasis_config.as_dict()),
        "numbers": json.dumps(numbers),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    save_file(tensors, str(path), metadata=header)


def load(cls: type[OasisCache], path: str | Path, model: Any, **options: Any) -> OasisCache:
    """Read a cache for `model`; `options` override the saved ones.

    Raises:
        SavedCacheError: another format or another model, naming the field.
    """
    with _open(path) as file:
        header = file.metadata() or {}
        if header.get("format") != FORMAT:
            raise SavedCacheError(
                f"saved cache: got format {header.get('format')!r}, expected {FORMAT!r}; {path} "
                "was not written by OasisCache.save of this version"
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    chosen = json.loads(header["options"]) | options
    if chosen["index"] not in INDEXES and "index" not in options:
        raise SavedCacheError(
            f"saved cache: its index {chosen['index']!r} is not built in; pass index=YourIndex"
        )
    _check_model(json.loads(header["model"]), _identity(getattr(model, "config", model)))
    cache = cls(model, **chosen)
    here, there = fingerprint(cache.model), header["fingerprint"]
    if here and there and here != there:
        raise SavedCacheError(
            f"saved cache: got weights {there}, expected {here}; it was made with other weights of "
            "this architecture, read the prompt again with this model"
        )
    _restore(cache, tensors, json.loads(header["numbers"]))
    return cache


def _open(path: str | Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise SavedCacheError(
            f"saved cache: got a file that is not safetensors ({error}), expected one written by "
            f"OasisCache.save; check {path}"
        ) from error


def _check_model(saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise SavedCacheError(
                f"saved cache: got {name}={saved.get(name)!r}, expected {value!r}; it belongs to "
                "another model, read the prompt again with this one"
            )


def _restore(cache: OasisCache, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
    device = cache.model.device if cache.model is not None else torch.device("cpu")
    columns, real = numbers["columns"], tensors.get("real")
    batch = 1
    for number, layer in enumerate(cache.layers):
        if f"{number}.k" not in tensors:
            continue
        k, v = (tensors[f"{number}.{part}"].to(device) for part in "kv")
        batch = k.shape[0]
        if isinstance(layer, OasisLayer):
            layer.adopt(k, v, tensors[f"{number}.lengths"].to(device), columns)
        else:
            layer.lazy_initialization(k, v)
            layer.keys, layer.values = k, v
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = numbers[f"{number}.seen"]
    moved = None if real is None else real.to(device)
    cache.ledger.append(moved, batch, columns, device)


def fork(cache: OasisCache, **options: Any) -> OasisCache:
    """An independent cache with the same contents; `options` may change anything but the model.

    A prompt is read once and then continued under several budgets, indexes or policies.
    """
    chosen = {name: getattr(cache.oasis_config, name) for name in type(cache.oasis_config).fields()}
    model = cache.model if cache.model is not None else cache.model_config
    other = type(cache)(model, **(chosen | options))
    other.ledger.copy_from(cache.ledger)
    for number, (old, new) in enumerate(zip(cache.layers, other.layers, strict=True)):
        same = isinstance(new, OasisLayer) == isinstance(old, OasisLayer)
        if not same:
            raise OasisUnsupportedError("fork: dense_layers must be those of the original cache")
        if isinstance(old, OasisLayer) and isinstance(new, OasisLayer):
            if old.is_initialized:
                k, v, _ = old.history(old.lengths.tolist())
                new.adopt(k, v, old.lengths, old.columns)
        elif isinstance(old, DenseLayer) and isinstance(new, DenseLayer):
            if old.is_initialized:
                new.lazy_initialization(*old.held())
                old_k, old_v = old.held()
                new.keys, new.values = old_k.clone(), old_v.clone()
        else:
            other.layers[number] = copy.deepcopy(old)
    return other


__all__ = ["SavedCacheError", "fingerprint", "fork", "load", "save"]
