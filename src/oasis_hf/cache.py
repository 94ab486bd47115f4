"""`OasisCache`: the cache that a user passes to `generate`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .config import OasisConfig, OasisConfigError
from .facts import compat
from .facts.ambient import kept_steady, uncompiled, without_gradient
from .facts.handle import OasisUnsupportedError
from .facts.wrappers import served_model
from .graphs.capture import Dispatcher, StepGraphs
from .index import group_tokens, index_class
from .integration.attention import NAME
from .integration.hooks import ForwardHook
from .integration.turns import Generate
from .layers import batch, rounds
from .layers.changes import hide
from .layers.dense_layer import DenseLayer
from .layers.forward import Drafting, Kind
from .layers.layer import OasisLayer
from .layers.ledger import PaddingLedger
from .layers.served import build_layers
from .layers.state import CacheState, native_state
from .report import summarise
from .saving import persistence
from .saving.copying import duplicate, refuse_pickle
from .stats import CacheStats
from .storage import store_class
from .storage.link import Allowance


class OasisCache(CacheState):
    """A KV cache whose full contents live in host memory, attended to sparsely.

    ```python
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="oasis")
    cache = OasisCache(model, budget=2048)
    model.generate(**inputs, past_key_values=cache)
    print(cache.stats())
    ```

    Layers with full attention are offloaded; sliding and linear layers, bounded already, are left
    to Transformers' own cache layers.

    Args:
        model: the model, what holds it (an adapter, a compiled module, ...), or its config. Built
            from a model, the cache also puts a forward pre-hook on it (removed with the cache),
            which cuts long prompts into pieces and repairs calls in which Transformers feeds tokens
            again that the cache already holds.
        **options: fields of `OasisConfig`.

    Raises:
        OasisConfigError: an option cannot be used.
        OasisUnsupportedError: the model cannot be served, or its attention is not "oasis".
    """

    def __init__(self, model: torch.nn.Module | PreTrainedConfig, **options: Any) -> None:
        config = _config(options)
        if isinstance(model, torch.nn.Module):
            model = served_model(model)
        model_config = model if isinstance(model, PreTrainedConfig) else _config_of(model)
        got = compat.attention_name(model_config)
        if got != NAME:
            raise OasisUnsupportedError(
                f"attention implementation: got {got!r}, expected {NAME!r}; call "
                f"model.set_attn_implementation({NAME!r}) first, or load the model with "
                f"attn_implementation={NAME!r}"
            )
        ledger = PaddingLedger()
        module = model if isinstance(model, torch.nn.Module) else None
        allowance = Allowance(config, module)
        layers = build_layers(model_config, config, ledger, allowance)
        super().__init__(config, model_config, layers, ledger, module)
        self.ledger.reconcile = weakref.WeakMethod(self._reconcile)
        self.graphs: StepGraphs | None = None
        if isinstance(model, torch.nn.Module):
            self.hook = ForwardHook(model, self)
            weakref.finalize(self, self.hook.remove)
            Generate.add(model, self)
            # Weights that are brought in for each forward have no address to capture.
            if config.graphs and all(weight.is_cuda for weight in model.parameters()):
                self.graphs = Dispatcher.add(model, self)
        elif config.prefill_chunk_size is not None:
            raise OasisConfigError(
                "prefill_chunk_size: needs OasisCache(model, ...), got only a config; pass the "
                "model, or prefill_chunk_size to generate"
            )

    # ---- Transformers' cache contract ----------------------------------------------------------

    @kept_steady
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take one layer's new K and V `[B, H, T, D]`; attention "oasis" stores and reads them."""
        if self.hook is None and layer_idx == self._first:
            self._open()
        try:
            return self._update(key_states, value_states, layer_idx, *args, **kwargs)
        except BaseException:
            self._abandon()
            raise

    def _update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == self._ours[0]:
            self._check_whole()
            self.begin(self.next_forward(key_states.shape[2]))
        layer = self.layers[layer_idx]
        if isinstance(layer, OasisLayer | DenseLayer):
            return layer.update(key_states, value_states, forward=self.forward)
        given = key_states, value_states
        k, v = layer.update(key_states.detach(), value_states.detach(), *args, **kwargs)
        if compat.is_sliding(layer):
            k, v = compat.visible(layer, key_states.shape[2], k, v)
        return without_gradient(k, *given), without_gradient(v, *given)

    @kept_steady
    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Take one layer's new state of a convolution; Transformers' own layers keep it."""
        held = super().update_conv_state(conv_states.detach(), *args, **kwargs)
        return without_gradient(held, conv_states)

    @kept_steady
    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Take one layer's new recurrent state; Transformers' own layers keep it."""
        held = super().update_recurrent_state(recurrent_states.detach(), *args, **kwargs)
        return without_gradient(held, recurrent_states)

    def _reconcile(self, mask: Tensor) -> None:
        """Follow a mask `[B, columns]` bool that says something else of earlier columns."""
        hide(self, mask)

    @uncompiled
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens given so far, padding included."""
        if layer_idx == 0:
            layer_idx = self._ours[0]
        return super().get_seq_length(layer_idx)

    @uncompiled
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that a layer's mask covers, and the first of them."""
        return super().get_mask_sizes(query_length, layer_idx)

    def activate_past_recording(self) -> None:
        """Announce that drafts will be verified and cropped; assisted decoding calls this first.

        A hand-written speculative loop should call it too: calls of several tokens are then
        attended to sparsely, as decoding, rather than densely, as a prompt.
        """
        self._record(Drafting.ANNOUNCED)

    def expect_drafts(self) -> None:
        """As `activate_past_recording`, where the prompt has been read: verifications follow."""
        self._record(Drafting.ON)

    def _record(self, drafting: Drafting) -> None:
        self._drafting = drafting
        for layer in self.offloaded:
            layer.recording = True
        super().activate_past_recording()

    @kept_steady
    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the newest tokens: -n removes n, 0 only ends a verification.

        A positive number is the length to keep, in versions of Transformers that take it.

        Raises:
            ValueError: more tokens than the cache holds, or a number that Transformers refuses.
            OasisUnsupportedError: more than a sliding layer has recorded; nothing is taken back.
        """
        self.close()
        held = self.ledger.columns
        count = compat.columns_to_crop(tokens_to_remove, held)
        if -count > held:
            raise ValueError(
                f"crop: got {count}, but the cache holds {held} tokens; use cache.reset() to "
                "empty it"
            )
        # Transformers' own layers may refuse; by then nothing has been taken back.
        native = native_state(self)
        try:
            for number, layer in enumerate(self.layers):
                if number not in self._ours:
                    layer.crop(count)
                    if compat.is_sliding(layer) and not compat.fills_window(layer):
                        raise OasisUnsupportedError(
                            f"crop: got {count}, but sliding layer {number} has recorded fewer of "
                            "the tokens before its window; take back drafts alone, or use "
                            "cache.fork() before what is to be taken back"
                        )
        except BaseException:
            for number, attributes in native.items():
                vars(self.layers[number]).update(attributes)
            raise
        removed = self.ledger.remove(-count)
        for layer in (self.layers[number] for number in self._ours):
            moved = removed.to(layer.device) if isinstance(removed, Tensor) else removed
            layer.drop(-count, moved)
        forward, self.forward = self.forward, None
        if forward is not None and forward.kind is Kind.VERIFY:
            self.rounds += 1
            self.drafted += forward.rows - 1
            # A crop may reach further than what was verified.
            self.accepted += max(0, forward.rows - 1 + count)

    @kept_steady
    def commit(
        self,
        rows: int,
        kept: Tensor,
        offered: Tensor | None = None,
        columns: int | None = None,
    ) -> None:
        """End a verification of a batch, of which every sequence accepts its own number of drafts.

        What is not kept is taken back from every part. The sequences are then laid out as a
        left-padded batch: their newest tokens stand in the last column, so the mask of the next
        forward is ones at the end and zeros before, `columns` of them.

        Args:
            rows: columns fed since the last commit.
            kept: `[B]` on the CPU: tokens of them that each sequence keeps, its first ones.
            offered: `[B]` on the CPU: real tokens among them, which come first; all by default.
            columns: columns afterwards, at least the tokens of any sequence; by default the fewest
                that need no sequence to move left.

        Raises:
            ValueError: a number does not fit; nothing is changed.
        """
        self.close()
        offered = torch.full_like(kept, rows) if offered is None else offered
        if columns is None:
            columns = self.ledger.columns - rows + (int(kept.max()) if kept.numel() else 0)
        rounds.check(self, rows, kept, offered, columns)
        rounds.commit(self, rows, kept, offered, columns)
        forward, self.forward = self.forward, None
        if forward is not None and forward.kind is Kind.VERIFY and forward.rows > 1:
            self.rounds += 1
            self.drafted += int((offered - 1).clamp(min=0).sum())
            self.accepted += int((kept - 1).clamp(min=0).sum())

    @kept_steady
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row beam_idx[i], in every part or in none.

        Raises:
            ValueError: numbers that are no rows of this cache.
        """
        self.close()
        if (held := self._rows) is not None:
            rows = batch.chosen(held, beam_idx, "beam_idx")
            self.forward = None
            self._take_all(rows, lambda layer: layer.reorder_cache(rows))

    @kept_steady
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows, in every part or in none.

        Raises:
            HostMemoryError: the larger batch does not fit; nothing has changed.
        """
        self.close()
        if (held := self._rows) is not None:
            rows = batch.repeated(held, repeats)
            self.forward = None
            self._take_all(rows, lambda layer: layer.batch_repeat_interleave(repeats))

    @kept_steady
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows `indices` (numbers or a bool mask), in every part or in none.

        Raises:
            ValueError: indices that do not fit the batch of this cache.
        """
        self.close()
        if (held := self._rows) is not None:
            rows = batch.chosen(held, indices, "indices")
            self.forward = None
            self._take_all(rows, lambda layer: layer.batch_select_indices(rows))

    def _take_all(self, rows: Tensor, native: Callable[[Any], None]) -> None:
        ours = [layer for layer in self.offloaded if layer.is_initialized]
        others = [layer for layer in self.layers if layer not in self.offloaded]
        batch.take_all(ours, others, self.ledger, rows, native)

    @property
    def _rows(self) -> int | None:
        """Sequences that the cache holds, or None if it is empty."""
        sizes = [layer.batch_size for layer in self.offloaded if layer.is_initialized]
        return sizes[0] if sizes else None

    @kept_steady
    def reset(self) -> None:
        """Forget everything and give all memory back; the cache can be used again."""
        self.close()
        self.ledger.reset()
        self.forward, self._drafting = None, Drafting.OFF
        self.expect()
        self.torn = False
        self.rounds = self.drafted = self.accepted = 0
        # Transformers' layers would keep zeroed tensors of the old shape.
        native = compat.native_layers(self.model_config)
        for number, layer in enumerate(self.layers):
            if number not in self._ours:
                self.layers[number] = native[number]
                continue
            layer.reset()
            if isinstance(layer, OasisLayer):
                layer.recording = False

    # ---- beyond the contract -------------------------------------------------------------------

    @kept_steady
    def save(self, path: str | Path) -> None:
        """Write the full KV to one safetensors file, which `load` reads for the same model only.

        A file that is there already stays until the new one is complete.

        Raises:
            OasisUnsupportedError: a layer holds recurrent state, or other adapters are in effect
                than when prompts were read; nothing is written.
            FileNotFoundError: there is no such folder.
        """
        persistence.save(self, path)

    @classmethod
    @kept_steady
    def load(cls, path: str | Path, model: Any, **options: Any) -> OasisCache:
        """Read a saved cache; `options` override the saved ones, budget and index included.

        The model must be the one that made it: its config (whatever changes no K or V aside), every
        weight, its dtype, its rotary embedding and the adapters in effect are compared. All of it
        is checked before anything is built.

        Raises:
            SavedCacheError: the file belongs to another model or format, naming what differs, or is
                damaged.
        """
        return persistence.load(cls, path, model, **options)

    @kept_steady
    def fork(self, **options: Any) -> OasisCache:
        """An independent copy, with other options if wanted: read a prompt once, try many."""
        self.forget_gradients()
        return persistence.fork(self, **options)

    @kept_steady
    def __deepcopy__(self, memo: dict[int, Any]) -> OasisCache:
        """An independent cache that goes on exactly as this one would; it serves the same model."""
        return duplicate(self, memo)

    @kept_steady
    def __copy__(self) -> OasisCache:
        """The same as a deep copy: two caches that share their parts would corrupt each other."""
        return duplicate(self, {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled.

        Raises:
            OasisUnsupportedError: always, naming `save`.
        """
        raise refuse_pickle(type(self).__name__)

    def stats(self) -> CacheStats:
        """What the cache holds and did; waits for the device."""
        return summarise(self)


def _config_of(model: torch.nn.Module) -> PreTrainedConfig:
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise OasisUnsupportedError(
            f"model: got {type(model).__name__}, expected a Transformers model or its config"
        )
    return config


def _config(options: dict[str, Any]) -> OasisConfig:
    """Validate the options, the index against the miss policy too."""
    known = OasisConfig.fields()
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise OasisConfigError(
            f"OasisCache: got unknown option {', '.join(unknown)}; expected some of "
            f"{', '.join(known)}"
        )
    config = OasisConfig(**options)
    index = index_class(config.index)
    group_tokens(index, config.block_tokens)
    store_class(config.store)
    if config.misses.needs_shares and (not index.estimates_mass or config.reduction != "mean"):
        raise OasisConfigError(
            f"on_miss: got the threshold {config.on_miss}, but index {index.name!r} with reduction "
            f"{config.reduction!r} does not estimate shares of attention; use index='keys2bit' and "
            "reduction='mean', or on_miss 'skip' or 'fetch'"
        )
    return config
