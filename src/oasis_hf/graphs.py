"""Whole decode steps as CUDA graphs, replayed inside plain `generate`.

An eager decode step of a large model is bound by the host that launches some forty kernels a layer.
Every decision of a step is made on the device, with fixed shapes, so the step of all layers can be
captured around the model's own forward, once per number of rows, and replayed.

A graph bakes in addresses and shapes, nothing else: token ids, positions and padding are copied
into buffers; lengths and choices live on the device. When the cache's capacity grows, its tables
move, and the graphs are captured again; so they are when a step may fetch more or fewer blocks.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .ambient import autocast_devices, steady, uncompiled
from .compat import CACHE_KWARGS, cache_of
from .engine import TritonEngine
from .fused import FusedLayers
from .native import DenseLayer
from .wrappers import AdapterState, is_compiled

if TYPE_CHECKING:
    from .cache import OasisCache

PLAIN = (
    *CACHE_KWARGS,
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "return_dict",
    "cache_position",
)
"""Arguments that a captured forward may be called with."""


class Dispatcher:
    """Stands in front of one model's forward; keeps its signature."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._original = model.forward
        self._was_instance = "forward" in model.__dict__
        self._graphs: weakref.WeakKeyDictionary[Any, StepGraphs] = weakref.WeakKeyDictionary()

        @functools.wraps(self._original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            graphs = self._graphs.get(cache_of(kwargs)) if not args else None
            if graphs is None:
                return self._original(*args, **kwargs)
            return graphs(self._original, kwargs)

        self.forward = model.forward = uncompiled(forward)

    @classmethod
    def add(cls, model: torch.nn.Module, cache: OasisCache) -> StepGraphs:
        """Serve `cache` too; however many caches, the model's forward is replaced once."""
        dispatcher = getattr(model.forward, "_oasis", None)
        if dispatcher is None:
            dispatcher = cls(model)
            dispatcher.forward._oasis = dispatcher  # type: ignore[attr-defined]
        graphs = StepGraphs(cache, model, dispatcher)
        dispatcher._graphs[cache] = graphs
        weakref.finalize(cache, dispatcher.drop_if_idle)
        return graphs

    def forget(self) -> None:
        """Have all caches capture anew: the model's weights are at other addresses."""
        for graphs in self._graphs.values():
            graphs.forget()

    def drop_if_idle(self) -> None:
        """Put the model's own forward back once no cache is left."""
        model = self._model()
        # A weak dictionary still counts what is about to leave it.
        served = any(True for _ in self._graphs)
        if model is None or served or model.__dict__.get("forward") is not self.forward:
            return
        if self._was_instance:
            model.forward = self._original
        else:
            del model.forward


class _Entry:
    """One captured step."""

    def __init__(self, ids: Tensor, positions: Tensor, valid: Tensor | None) -> None:
        self.ids, self.positions, self.valid = ids.clone(), positions.clone(), valid
        self.graph = torch.cuda.CUDAGraph()
        self.outputs: dict[str, Tensor] = {}
        self.kind: type | None = None


class StepGraphs:
    """The captured steps of one cache.

    Attributes:
        captured: graphs captured so far.
        replayed: steps served by a graph.
        eager: decode steps that ran eagerly, by reason.
        fused: decoder layers compiled into the graphs.
    """

    def __init__(self, cache: OasisCache, model: torch.nn.Module, dispatcher: Dispatcher) -> None:
        self._cache, self._model = weakref.ref(cache), weakref.ref(model)
        self._dispatcher = dispatcher
        self._adapters = AdapterState(model)
        self._fused: FusedLayers | None = None
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        self._warm: set[tuple[Any, ...]] = set()
        self._pool: Any = None
        self.captured = self.replayed = 0
        self.eager: dict[str, int] = {}

    def summary(self) -> dict[str, Any]:
        """Counts, and why steps ran eagerly."""
        return {
            "captured": self.captured,
            "replayed": self.replayed,
            "eager": dict(self.eager),
            "fused": 0 if self._fused is None else len(self._fused),
        }

    def forget(self) -> None:
        """Drop what was captured."""
        self._entries.clear()

    def __call__(self, forward: Any, kwargs: dict[str, Any]) -> Any:
        """Run one forward of the model, by a graph where possible."""
        cache = self._cache()
        assert cache is not None
        ids = kwargs.get("input_ids")
        if not isinstance(ids, Tensor) or not cache.is_decode(ids.shape[1]):
            return forward(**kwargs)
        reason = self._obstacle(cache, ids, kwargs)
        if reason is not None:
            self.eager[reason] = self.eager.get(reason, 0) + 1
            return forward(**kwargs)
        with steady():
            return self._step(cache, forward, kwargs, ids)

    def _step(self, cache: OasisCache, forward: Any, kwargs: dict[str, Any], ids: Tensor) -> Any:
        """Serve a step by a graph, after an eager one of its kind."""
        mask = kwargs.get("attention_mask")
        key = self._key(cache, ids, mask, kwargs)
        if key not in self._warm:
            self._warm.add(key)
            self.eager["warm-up"] = self.eager.get("warm-up", 0) + 1
            with self._compiling(cache):
                return forward(**kwargs)
        entry = self._entries.get(key)
        rows = ids.shape[1]
        positions = self._positions(cache, ids, kwargs)
        valid = None if mask is None else mask[:, -rows:].bool()
        cache.ledger.append(valid, ids.shape[0], rows, ids.device)
        if entry is None:
            entry = self._capture(cache, forward, kwargs, ids, positions, valid)
            self._entries = {key: entry} | {
                k: e for k, e in self._entries.items() if k[0] == key[0]
            }
        else:
            entry.ids.copy_(ids)
            entry.positions.copy_(positions)
            if entry.valid is not None and valid is not None:
                entry.valid.copy_(valid)
            cache.begin(rows)
            for layer in cache.offloaded:
                layer.advanced(rows)
        entry.graph.replay()
        self.replayed += 1
        outputs = {name: tensor.clone() for name, tensor in entry.outputs.items()}
        assert entry.kind is not None
        return entry.kind(**outputs, **{self._cache_field: cache})

    def _key(
        self, cache: OasisCache, ids: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        first = cache.offloaded[0]
        state = (id(first.store), first.store.blocks, first.tail.k.data_ptr())
        rows = ids.shape[1]
        baked = (first.scanned_after(rows), first.cap_after(rows).blocks)
        call = tuple(ids.shape), mask is None, kwargs.get("logits_to_keep", 0)
        return state, baked, *call, self._adapters()

    def _obstacle(self, cache: OasisCache, ids: Tensor, kwargs: dict[str, Any]) -> str | None:
        """Why this step cannot be a graph, or None."""
        if any(value is not None and name not in PLAIN for name, value in kwargs.items()):
            return "the call has unusual arguments"
        if not isinstance(kwargs.get("logits_to_keep", 0), int):
            return "logits_to_keep is a tensor"
        if autocast_devices():
            # Weights in another dtype are copied, and the copies live as long as autocast is on.
            return "autocast is on"
        if is_compiled(self._dispatcher._original):
            return "the forward is compiled by torch.compile"
        layers = cache.offloaded
        if len(layers) != len(cache.layers) or any(isinstance(x, DenseLayer) for x in cache.layers):
            return "some layers are not offloaded"
        if not all(isinstance(layer.engine, TritonEngine) for layer in layers):
            return "the backend is not triton"
        if len({layer.device for layer in layers} | {ids.device}) > 1:
            return "the model is spread over devices"
        if any(layer.cold for layer in layers):
            model = self._model()
            if model is not None:
                self._adapters = AdapterState(model)
            return "first step after a prompt"
        if not all(layer.engine.native for layer in layers):
            return "the index has no kernel"
        need = layers[0].columns + ids.shape[1] + layers[0].geometry.group
        if need > layers[0].store.blocks * layers[0].geometry.block:
            return "the capacity grows"
        return None

    def _compiling(self, cache: OasisCache) -> AbstractContextManager[None]:
        """Where a step is made ready for a graph: with compiled layers, if they were asked for."""
        model = self._model()
        if not cache.oasis_config.compile or model is None:
            return nullcontext()
        if self._fused is None:
            self._fused = FusedLayers(model)
            if self._fused.moved:
                self._dispatcher.forget()
        return self._fused.active()

    def _positions(self, cache: OasisCache, ids: Tensor, kwargs: dict[str, Any]) -> Tensor:
        given = kwargs.get("position_ids")
        if given is not None:
            return given
        start = cache.get_seq_length()
        return torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape)

    def _capture(
        self,
        cache: OasisCache,
        forward: Any,
        kwargs: dict[str, Any],
        ids: Tensor,
        positions: Tensor,
        valid: Tensor | None,
    ) -> _Entry:
        """Record the step; nothing runs until the first replay."""
        entry = _Entry(ids, positions, None if valid is None else valid.clone())
        call = dict(kwargs, input_ids=entry.ids, position_ids=entry.positions, attention_mask=None)
        for layer in cache.offloaded:
            layer.engine.join()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        cache.ledger.static, cache.ledger.frozen = entry.valid, True
        torch.cuda.synchronize(ids.device)
        try:
            with (
                self._compiling(cache),
                torch.cuda.device(ids.device),
                torch.cuda.graph(entry.graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                output = forward(**call)
                for layer in cache.offloaded:
                    layer.engine.join()
        finally:
            cache.ledger.static, cache.ledger.frozen = None, False
        self.captured += 1
        entry.kind = type(output)
        entry.outputs = {name: x for name, x in output.items() if isinstance(x, Tensor)}
        self._cache_field = next(name for name, x in output.items() if x is cache)
        return entry
