"""Whole decode steps as CUDA graphs, replayed inside plain `generate`.

An eager decode step of a large model is bound by the host that launches some forty kernels a layer.
Every decision of a step is made on the device, with fixed shapes, so the step of all layers can be
captured around the model's own forward, once per number of rows, and replayed.

A graph bakes in addresses, shapes and what the model's own code took from Python: token ids,
positions and padding are copied into buffers; lengths and choices live on the device. Addresses and
object ids are given again to others, so no graph is known by them: every change of a layer's
storage, such as a growth of its capacity or a batch operation, takes a new epoch, and the graphs
are captured again. So they are when a step may fetch more or fewer blocks, under another autocast,
and when the model is no longer what it was (`watch`).
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..facts.ambient import autocast_devices, steady, uncompiled
from ..facts.compat import CACHE_KWARGS, asks_for_more, cache_of, follows_length
from ..facts.handle import OasisUnsupportedError
from ..facts.watch import ModelWatch
from ..facts.wrappers import is_compiled
from ..index import built_in
from ..integration.stand_in import StandIn
from ..layers.dense_layer import DenseLayer
from ..layers.forward import Forward
from ..layers.state import CacheState
from ..storage.streams import whole_device
from .fused import FusedLayers

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


class Dispatcher(StandIn):
    """Stands in front of one model's forward.

    Of several threads that use the model, one at a time runs a forward with a cache: a capture must
    not meet another's work, and while layers are compiled they are replaced for all.
    """

    method = "forward"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._turn = threading.RLock()

    @property
    def replaces_compiled(self) -> bool:
        """Whether the model's own forward is one that `torch.compile` returned."""
        return is_compiled(self._original)

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        cache = cache_of(kwargs)
        if cache is None:
            return self._original(*args, **kwargs)
        with self._turn:
            graphs = self.served.get(cache) if not args else None
            if graphs is None:
                return self._original(*args, **kwargs)
            return graphs(self._original, kwargs)

    @classmethod
    def add(cls, model: torch.nn.Module, cache: CacheState) -> StepGraphs:
        """Serve `cache` too."""
        dispatcher = cls.in_front_of(model)
        graphs = StepGraphs(cache, model, dispatcher)
        dispatcher.serve(cache, graphs)
        return graphs

    def forget(self) -> None:
        """Have all caches capture anew: the model's weights are at other addresses."""
        for graphs in list(self.served.values()):
            graphs.forget()


class _Entry:
    """One kind of step: its inputs' memory, and its graph once it is captured."""

    def __init__(self, ids: Tensor, positions: Tensor, valid: Tensor | None) -> None:
        # Later steps write here, in inference mode or out of it.
        with torch.inference_mode(False):
            self.ids, self.positions = ids.clone(), positions.clone()
            self.valid = None if valid is None else valid.clone()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: dict[str, Tensor] = {}
        self.kind: type | None = None
        self.cache_field: str | None = None

    def fill(self, ids: Tensor, positions: Tensor, valid: Tensor | None) -> None:
        """Take the inputs of another step of this kind."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        if self.valid is not None and valid is not None:
            self.valid.copy_(valid)


class StepGraphs:
    """The captured steps of one cache.

    Attributes:
        captured: graphs captured so far.
        replayed: steps served by a graph.
        eager: decode steps that ran eagerly, by reason.
        fused: decoder layers compiled into the graphs.
    """

    def __init__(self, cache: CacheState, model: torch.nn.Module, dispatcher: Dispatcher) -> None:
        self._cache, self._model = weakref.ref(cache), weakref.ref(model)
        self._dispatcher = dispatcher
        self._watch = ModelWatch(model)
        self._fused: FusedLayers | None = None
        self._follows_length: bool | None = None
        self._entries: dict[tuple[Any, ...], _Entry] = {}
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
        """Drop what was captured, and what was made of the model's weights."""
        self._entries.clear()
        self._fused = self._follows_length = None
        self._watch.forget()

    def _look(self, thoroughly: bool) -> None:
        """Forget everything if the model is another than before."""
        if self._watch.changed(thoroughly):
            self.forget()
            self._watch.look()

    def __call__(self, forward: Any, kwargs: dict[str, Any]) -> Any:
        """Run one forward of the model, by a graph where possible."""
        cache = self._cache()
        assert cache is not None
        ids = kwargs.get("input_ids")
        if not isinstance(ids, Tensor) or cache.next_forward(ids.shape[1]).dense:
            if self._entries:
                # A prompt takes long enough to look at the whole model.
                self._look(thoroughly=True)
            return forward(**kwargs)
        reason = self._obstacle(cache, ids, kwargs)
        if reason is not None:
            self.eager[reason] = self.eager.get(reason, 0) + 1
            return forward(**kwargs)
        with steady():
            return self._step(cache, forward, kwargs, ids)

    def _step(self, cache: CacheState, forward: Any, kwargs: dict[str, Any], ids: Tensor) -> Any:
        """Serve a step by a graph, after an eager one of its kind."""
        self._look(thoroughly=False)
        mask, rows = kwargs.get("attention_mask"), ids.shape[1]
        positions = self._positions(cache, ids, kwargs)
        key = self._key(cache, ids, positions, mask, kwargs)
        valid = None if mask is None else mask[:, -rows:].bool()
        coming, entry = cache.next_forward(rows), self._entries.get(key)
        # What an eager step left running alongside, a graph knows nothing of.
        for layer in cache.offloaded:
            layer.parts.join()
        cache.ledger.append(valid, ids.shape[0], rows, ids.device, coming.ids)
        if entry is None:
            # As the capture will call it: what is compiled now is not compiled again then.
            entry = _Entry(ids, positions, valid)
            self.eager["warm-up"] = self.eager.get("warm-up", 0) + 1
            with self._compiling(cache):
                output = self._call(cache, forward, kwargs, entry, coming)
            self._entries = {key: entry} | {
                k: e for k, e in self._entries.items() if k[0] == key[0]
            }
            return output
        entry.fill(ids, positions, valid)
        if entry.graph is None:
            entry.graph = self._capture(cache, forward, kwargs, entry, coming)
        else:
            cache.begin(coming)
            for layer in cache.offloaded:
                layer.advanced(rows)
        entry.graph.replay()
        self.replayed += 1
        outputs = {name: tensor.clone() for name, tensor in entry.outputs.items()}
        assert entry.kind is not None
        return entry.kind(**outputs, **({name: cache} if (name := entry.cache_field) else {}))

    def _key(
        self,
        cache: CacheState,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """What a graph is known by; first of all the storage of every layer."""
        first, rows = cache.offloaded[0].parts, ids.shape[1]
        kind = ids.device.type
        ambient = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return (
            tuple(layer.epoch for layer in cache.offloaded),
            (first.scanned_after(rows), first.covers_after(rows), first.cap_after(rows).blocks),
            (ids.shape, ids.dtype, positions.shape, positions.dtype, mask is None),
            (kwargs.get("logits_to_keep", 0), ambient, torch.is_inference_mode_enabled()),
        )

    def _obstacle(self, cache: CacheState, ids: Tensor, kwargs: dict[str, Any]) -> str | None:
        """Why this step cannot be a graph, or None."""
        if any(value is not None and name not in PLAIN for name, value in kwargs.items()):
            return "the call has unusual arguments"
        if not isinstance(kwargs.get("logits_to_keep", 0), int):
            return "logits_to_keep is a tensor"
        if autocast_devices():
            # Weights in another dtype are copied, and the copies live as long as autocast is on.
            return "autocast is on"
        if self._dispatcher.replaces_compiled:
            return "the forward is compiled by torch.compile"
        if kwargs.get("use_cache") is False or kwargs.get("return_dict") is False:
            return "the call has unusual arguments"
        mask = kwargs.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.shape[:-1] == ids.shape[:1]):
            return "the mask is no mask of columns"
        if torch.is_grad_enabled():
            return "gradients are recorded"
        if asks_for_more(cache.model_config):
            return "the config asks for more than logits"
        if self._follows_length is None:
            self._follows_length = follows_length(cache.model_config)
        if self._follows_length:
            return "the rotary embedding follows the length"
        layers = cache.offloaded
        if len(layers) != len(cache.layers) or any(isinstance(x, DenseLayer) for x in cache.layers):
            return "some layers are not offloaded"
        if not all(layer.is_initialized and layer.parts.backend == "triton" for layer in layers):
            return "the backend is not triton"
        if len({layer.device for layer in layers} | {ids.device}) > 1:
            return "the model is spread over devices"
        if any(layer.parts.cold for layer in layers):
            return "first step after a prompt"
        # Layers grow together.
        if not layers[0].parts.fits(ids.shape[1]):
            return "the capacity grows"
        return None

    def _compiling(self, cache: CacheState) -> AbstractContextManager[None]:
        """Where a step is made ready for a graph: with compiled layers, if they were asked for."""
        model = self._model()
        if not cache.oasis_config.compile or model is None:
            return nullcontext()
        if self._fused is None:
            fused = FusedLayers(model)
            if fused.moved:
                self._dispatcher.forget()
            self._fused = fused
            self._watch.look()
        return self._fused.active()

    def _positions(self, cache: CacheState, ids: Tensor, kwargs: dict[str, Any]) -> Tensor:
        given = kwargs.get("position_ids")
        if given is not None:
            return given
        start = cache.get_seq_length()
        return torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape)

    def _call(
        self,
        cache: CacheState,
        forward: Any,
        kwargs: dict[str, Any],
        entry: _Entry,
        coming: Forward,
    ) -> Any:
        """The model's forward over an entry's memory; its columns are recorded already."""
        cache.forward = replace(coming, recorded=True, real=entry.valid)
        call = dict(kwargs, input_ids=entry.ids, position_ids=entry.positions, attention_mask=None)
        try:
            return forward(**call)
        finally:
            cache.forward = coming

    def _capture(
        self,
        cache: CacheState,
        forward: Any,
        kwargs: dict[str, Any],
        entry: _Entry,
        coming: Forward,
    ) -> torch.cuda.CUDAGraph:
        """Record a step; nothing runs until the first replay."""
        graph = torch.cuda.CUDAGraph()
        if not any(other.graph for other in self._entries.values()):
            # A pool of which no graph is left cannot be captured into again.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with (
                whole_device,
                self._compiling(cache),
                torch.cuda.device(entry.ids.device),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                output = self._call(cache, forward, kwargs, entry, coming)
                for layer in cache.offloaded:
                    layer.parts.join()
        except RuntimeError as error:
            index = type(cache.offloaded[0].parts.index)
            if built_in(index):
                raise
            raise OasisUnsupportedError(
                f"index {index.__name__}: a step with it cannot be captured in a CUDA graph "
                f"({error}); its encode and block_logits may neither look at values (.item(), "
                ".tolist(), bool(...), .cpu()) nor have shapes that follow from them. Or use "
                "graphs=False"
            ) from error
        self.captured += 1
        entry.kind = type(output)
        entry.outputs = {name: x for name, x in output.items() if isinstance(x, Tensor)}
        entry.cache_field = next((name for name, x in output.items() if x is cache), None)
        return graph
