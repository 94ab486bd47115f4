"""Saving, loading and forking a cache: the full KV travels, everything else is derived again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig

from ..facts import compat
from ..facts.handle import OasisUnsupportedError
from ..facts.wrappers import served_model
from ..index import INDEXES
from ..layers.dense_layer import DenseLayer
from ..layers.layer import OasisLayer
from ..layers.ledger import Record
from ..layers.state import CacheState
from ..lookahead import LRU, PREDICTORS
from .copying import twin
from .fingerprint import Fingerprint, adapter_state, fingerprint
from .identity import describe, difference
from .placement import layer_devices
from .savefile import DENSE, NATIVE, OFFLOADED, Saved, SavedCacheError, SavedFile, write

C = TypeVar("C", bound=CacheState)


def save(cache: CacheState, path: str | Path) -> None:
    """Write the cache to one safetensors file; see `OasisCache.save`."""
    cache.settle()
    model = cache.model
    if model is not None and cache.ledger.columns and cache.read_with - {adapter_state(model)}:
        raise OasisUnsupportedError(
            "save: got tokens that were read with other adapters in effect than the model has now "
            "(another one, or one that is disabled, scaled or merged); choose those again before "
            "saving, or read the prompt again"
        )
    tensors: dict[str, Tensor] = {}
    kinds: dict[int, str] = {}
    columns = cache.ledger.columns
    for number, layer in enumerate(cache.layers):
        if compat.is_placeholder(layer):
            continue
        if compat.is_linear(layer):
            raise OasisUnsupportedError(
                f"save: layer {number} holds recurrent state, which this format does not cover; "
                "cache.fork() copies it in memory"
            )
        if not columns or not layer.is_initialized:
            continue
        kinds[number] = DENSE if isinstance(layer, DenseLayer) else NATIVE
        if isinstance(layer, OasisLayer):
            kinds[number] = OFFLOADED
            k, v, _ = layer.history(layer.parts.frontier.lengths.tolist())
            tensors[f"{number}.lengths"] = layer.parts.frontier.lengths.cpu()
            for name, learned in layer.knowledge_for(layer).items():
                tensors[f"{number}.index.{name}"] = learned.cpu().contiguous()
        else:
            # Copies: the two may be one memory, or parts of a larger one.
            k, v = (t.detach().cpu().clone() for t in (layer.keys, layer.values))
        tensors[f"{number}.k"], tensors[f"{number}.v"] = (
            t.detach().cpu().contiguous() for t in (k, v)
        )
    for name, told in (("real", cache.ledger.real()), ("ids", cache.ledger.ids())):
        if columns and told is not None:
            tensors[name] = told.cpu().contiguous()
    saved = Saved(
        model=describe(cache.model_config),
        fingerprint="" if model is None else fingerprint(model).as_json(),
        options=cache.oasis_config.as_dict(),
        columns=columns,
        layers=kinds,
        tensors=tensors,
    )
    write(saved, path)


def load(cls: Callable[..., C], path: str | Path, model: Any, **options: Any) -> C:
    """Read a cache for `model`; `options` override the saved ones.

    Raises:
        SavedCacheError: another format or another model, naming what differs, or a damaged file.
    """
    file = SavedFile(path)
    if isinstance(model, torch.nn.Module):
        model = served_model(model)
    config = getattr(model, "config", model)
    found = difference(file.head.model, describe(config))
    if found is not None:
        name, got, want = found
        raise SavedCacheError(
            f"saved cache: got {name}={got!r}, expected {want!r}; it belongs to another model, "
            "read the prompt again with this one"
        )
    if isinstance(model, torch.nn.Module):
        _check_model(file, model)
    chosen = file.head.options | options
    _check_own(chosen, options)
    _check_layers(file, config, chosen["dense_layers"])
    saved = file.read()
    cache = cls(model, **chosen)
    _restore(cache, saved)
    return cache


def _check_own(chosen: dict[str, Any], options: dict[str, Any]) -> None:
    """Ask for classes and objects of a user's own, of which a file has the names only."""
    own = {
        "index": (INDEXES, "YourIndex"),
        "store": (("pinned",), "YourStore"),
        "lookahead": ((LRU, *PREDICTORS), "YourPredictor()"),
        "on_miss": (("fetch", "skip"), "YourPolicy()"),
    }
    for name, (known, example) in own.items():
        value = chosen.get(name)
        first = value.split("+")[0] if isinstance(value, str) else None
        if first is not None and first not in known and name not in options:
            raise SavedCacheError(
                f"saved cache: its {name} {value!r} is not built in; pass {name}={example}"
            )


def _check_layers(file: SavedFile, config: PreTrainedConfig, dense: Any) -> None:
    """Refuse a file whose layers are of other kinds than those of the cache to be built."""
    if not file.head.columns or not isinstance(dense, list | tuple):
        return
    for number, layer in enumerate(compat.native_layers(config)):
        if compat.is_placeholder(layer):
            continue
        want = NATIVE
        if compat.is_full_attention(layer):
            want = DENSE if number in dense else OFFLOADED
        got = file.head.layers.get(number, "nothing")
        if got != want:
            raise SavedCacheError(
                f"saved cache: got layer {number} as {got}, expected {want}; dense_layers must be "
                f"those that it was saved with, {file.head.options['dense_layers']}"
            )


def _check_model(file: SavedFile, model: torch.nn.Module) -> None:
    """Refuse a model that does not make the K and V of a file."""
    here = fingerprint(model)
    text = file.head.fingerprint
    there = Fingerprint.from_json(text) if text else None
    held = None if there is None else there.dtype
    dtype = str(file.dtype() or here.dtype) if held is None else held
    if dtype != here.dtype:
        raise SavedCacheError(
            f"saved cache: got dtype {dtype}, expected {here.dtype}, the model's; load the model "
            f"with dtype={dtype}, or read the prompt again with this one"
        )
    if there is None:
        warnings.warn(
            "saved cache: it was written by a cache that was built from a config, so whether these "
            "are the weights that made it cannot be checked; use OasisCache(model, ...)",
            stacklevel=4,
        )
        return
    if not here.same_rope(there):
        raise SavedCacheError(
            "saved cache: got other frequencies of the rotary embedding than the model's; it was "
            "made with another scaling of positions, read the prompt again with this model"
        )
    if here.adapters != there.adapters:
        raise SavedCacheError(
            f"saved cache: got {_adapters(there)}, expected {_adapters(here)}, which the model "
            "has in effect now; choose the saved ones, or read the prompt again with this model"
        )
    same = here.weights == there.weights
    if not same and file.head.transformers != transformers.__version__:
        # Another version may have other names for the same weights.
        same = here.contents == there.contents
    if not same:
        raise SavedCacheError(
            f"saved cache: got weights {there.weights}, expected {here.weights}; it was made with "
            "other weights of this architecture (fine-tuned, merged or quantised otherwise), read "
            "the prompt again with this model"
        )


def _adapters(model: Fingerprint) -> str:
    """The adapters of a fingerprint, for a message."""
    if not model.adapters:
        return "no adapter"
    return f"adapters {', '.join(model.adapter_names) or 'none'} (in effect: {model.adapters})"


def _restore(cache: CacheState, saved: Saved) -> None:
    """Fill an empty cache."""
    model, count = cache.model, len(cache.layers)
    places = [torch.device("cpu")] * count if model is None else layer_devices(model, count)
    for number, device in enumerate(places):
        if number not in saved.layers:
            continue
        layer, parts = cache.layers[number], (saved.tensors[f"{number}.{part}"] for part in "kv")
        k, v = (t.to(device) for t in parts)
        if isinstance(layer, OasisLayer):
            lengths = saved.tensors[f"{number}.lengths"].to(device)
            layer.adopt(k, v, lengths, saved.columns, knowledge=_knowledge(saved, number, layer))
            continue
        # Copies: the tensors of a file may be the file itself, mapped into memory.
        k, v = k.clone(), v.clone()
        layer.lazy_initialization(k, v)
        layer.keys, layer.values = k, v
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = saved.columns
    told = (saved.tensors.get(name) for name in ("real", "ids"))
    device = places[min(saved.layers)] if saved.layers else places[0]
    real, ids = (None if x is None else x.to(device, copy=True) for x in told)
    cache.ledger.restore(Record(saved.columns, real, ids))
    if model is not None:
        cache.read_with.add(adapter_state(model))


def _knowledge(saved: Saved, number: int, layer: OasisLayer) -> dict[str, Tensor]:
    """What the index of a layer had learned, if the one that it has now is of that kind."""
    if saved.options["index"] != layer.config.as_dict()["index"]:
        return {}
    prefix = f"{number}.index."
    return {n.removeprefix(prefix): x for n, x in saved.tensors.items() if n.startswith(prefix)}


@torch.no_grad()
def fork(cache: C, **options: Any) -> C:
    """An independent cache with the same contents; `options` may change anything but the model.

    A prompt is read once and then continued under several budgets, indexes or policies.
    """
    cache.settle()
    chosen = {name: getattr(cache.oasis_config, name) for name in type(cache.oasis_config).fields()}
    model = cache.model if cache.model is not None else cache.model_config
    other = type(cache)(model, **(chosen | options))
    other.ledger.copy_from(cache.ledger)
    other.read_with |= cache.read_with
    for number, (old, new) in enumerate(zip(cache.layers, other.layers, strict=True)):
        same = isinstance(new, OasisLayer) == isinstance(old, OasisLayer)
        if not same:
            raise OasisUnsupportedError("fork: dense_layers must be those of the original cache")
        if isinstance(old, OasisLayer) and isinstance(new, OasisLayer):
            if old.is_initialized:
                k, v, _ = old.history(old.parts.frontier.lengths.tolist())
                new.adopt(
                    k,
                    v,
                    old.parts.frontier.lengths,
                    old.columns,
                    knowledge=old.knowledge_for(new),
                )
        elif isinstance(old, DenseLayer) and isinstance(new, DenseLayer):
            if old.is_initialized:
                new.lazy_initialization(*old.held())
                old_k, old_v = old.held()
                new.keys, new.values = old_k.clone(), old_v.clone()
        else:
            other.layers[number] = twin(old, {})
    return other


__all__ = ["SavedCacheError", "fork", "load", "save"]
