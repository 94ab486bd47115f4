"""The attention implementation "oasis" and its mask, as registered with Transformers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ..facts import compat
from ..facts.ambient import autocast_devices, in_dtype, steady, uncompiled, without_gradient
from ..facts.handle import (
    BYPASS,
    WITHHELD,
    OasisLength,
    OasisUnsupportedError,
    layer_of,
    take_pending,
)
from ..layers.dense_layer import DenseLayer
from ..layers.layer import OasisLayer
from ..ops import AttentionSpec
from ..step.inputs import AttentionInputs

Offloaded = OasisLayer | DenseLayer

NAME = "oasis"
REFUSED = ("s_aux", "softcap", "position_bias", "indices", "block_indices")
"""Arguments that change the attention itself and that no backend here implements."""


class _MaskError(OasisUnsupportedError, AttributeError):
    """A model works on the mask itself; an AttributeError too, so that `hasattr` answers."""

    def __init__(self) -> None:
        super().__init__(
            "the model works on the attention mask itself before Transformers' attention interface "
            "gets it; OasisCache cannot serve this model"
        )


@dataclass(frozen=True)
class OasisMask:
    """Plain causal attention over an `OasisCache`: no matrix, just which columns are real.

    A model that bypasses the attention interface treats it as a tensor, which is an error here.

    Attributes:
        columns: length of the context, the new rows included.
        real: `[B, columns]` bool, False for padding; None if all are real.
    """

    columns: int
    real: Tensor | None
    _all_real: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)

    def all_real(self, rows: int) -> bool:
        """Whether the newest `rows` columns hold no padding; asks the device once a forward."""
        if self.real is None:
            return True
        if rows not in self._all_real:
            self._all_real[rows] = bool(self.real[:, -rows:].all())
        return self._all_real[rows]

    def to(self, *args: Any, **kwargs: Any) -> "OasisMask":
        """The mask on another device."""
        return self if self.real is None else replace(self, real=self.real.to(*args, **kwargs))

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _MaskError

    def __getattr__(self, name: str) -> Any:
        raise _MaskError

    def __getitem__(self, index: Any) -> "OasisMask":
        """The mask of the last query rows; how many they are, the query itself tells.

        Gemma 4 takes them (since 5.24) for the layers that share the K and V of another one.
        """
        match index:
            case (slice() as batch, slice() as heads, slice() as rows, slice() as columns):
                whole = batch == heads == columns == slice(None)
                if whole and rows.stop is None and rows.step is None and (rows.start or 0) <= 0:
                    return self
        raise _MaskError


@uncompiled
def oasis_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Any:
    """Mask for attention "oasis": an `OasisMask` over an `OasisCache`, sdpa's mask otherwise.

    The signature is Transformers' mask interface. A mask that is not plainly causal (packed
    sequences, bidirectional prefixes) is built in full, and refused later by an offloaded layer.

    Raises:
        OasisUnsupportedError: the mask is for a model that attention "oasis" does not reach.
    """
    config = kwargs.get("config")
    if config is not None and compat.bypasses_attention(config):
        raise OasisUnsupportedError(f"{config.model_type}: {BYPASS}")
    plain = local_size is None and mask_function is causal_mask_function
    if isinstance(kv_length, OasisLength) and plain:
        return OasisMask(int(kv_length), attention_mask)
    ours = isinstance(kv_length, OasisLength)
    if ours or (config is not None and compat.slices_masks(config)):
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        local_size,
        **kwargs,
    )


@uncompiled
def oasis_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over the layer of an `OasisCache` that `key` came from; sdpa for all other keys.

    The signature is Transformers' attention interface: query `[B, Hq, T, D]`, key and value
    `[B, H, T, D]`; returns `[B, T, Hq, Dv]`.

    Raises:
        OasisUnsupportedError: the model changes K or V after storing them, or asks for an attention
            that is not implemented.
    """
    layer: Offloaded | None = layer_of(key, value)
    pending = take_pending()
    name = type(module).__name__
    for argument in REFUSED:
        if kwargs.get(argument) is not None:
            raise OasisUnsupportedError(
                f"{name} passes {argument!r}, which attention 'oasis' does not implement; use "
                "another attention implementation for this model"
            )
    if layer is None:
        if isinstance(attention_mask, OasisMask) and pending is None and module.training:
            raise OasisUnsupportedError(f"{name}: {WITHHELD}")
        if pending is not None or isinstance(attention_mask, OasisMask):
            raise OasisUnsupportedError(
                f"{name}: K and V are transformed or moved between cache.update() and attention "
                "(latent KV, repeated heads, K and V shared across devices); OasisCache cannot "
                "serve this model"
            )
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and compat.refuses_sdpa(config):
            raise OasisUnsupportedError(
                f"{name}: Transformers does not run this model with sdpa, which attention 'oasis' "
                "is for sliding layers and other caches; use another attention implementation for "
                "this model"
            )
        if not autocast_devices():
            # A cache may hold what an earlier forward stored under autocast.
            key, value = in_dtype(query.dtype, key, value)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    try:
        with steady():
            options = {"dropout": dropout, **kwargs}
            out = _attend(
                module, layer, pending, query, key, value, attention_mask, scaling, options
            )
            out = out.to(query.dtype).transpose(1, 2).contiguous()
    except BaseException:
        layer.ledger.give_up()
        raise
    return without_gradient(out, query, key, value), None


def _attend(
    module: torch.nn.Module,
    layer: Offloaded,
    pending: Offloaded | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """As `oasis_attention`, over a layer of a cache: `[B, Hq, T, Dv]`."""
    name = type(module).__name__
    _check(module, layer, pending, attention_mask, kwargs)
    new, rows = pending is layer, query.shape[2]
    if new and key.shape[2] != rows:
        raise OasisUnsupportedError(
            f"{name}: {key.shape[2]} new K and V for {rows} queries; cross-attention is not "
            "supported"
        )
    forward, valid = layer.forward, None
    assert forward is not None
    if isinstance(attention_mask, OasisMask) and attention_mask.real is not None:
        valid = _rows_of(attention_mask.real, layer, key.shape[2], new)
        # A prompt may wait for the device.
        if forward.dense and attention_mask.all_real(key.shape[2]):
            valid = None
    if forward.recorded:
        valid = forward.real
    elif new and layer.leads:
        layer.ledger.append(valid, query.shape[0], rows, query.device, forward.ids)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Autocast may give K, V and the query dtypes of their own: those of the cache stay.
    dtype = layer.dtype if layer.is_initialized else key.dtype
    q, k, v = in_dtype(dtype, query, key, value)
    return layer.attend(AttentionInputs(q, k, v, valid, AttentionSpec(scale), new))


def check_width(mask: Tensor, past: int, rows: int) -> None:
    """Refuse a mask `[B, C]` that does not cover what the cache holds and the new tokens.

    Raises:
        ValueError: with the columns that were expected.
    """
    if mask.shape[1] != past + rows:
        raise ValueError(
            f"attention_mask: got {mask.shape[1]} columns, expected {past + rows}: {past} "
            f"in the cache and {rows} new; pass only the tokens that the cache does not hold, with "
            "a mask over all of them"
        )


def _rows_of(real: Tensor, layer: Offloaded, rows: int, new: bool) -> Tensor:
    """Which of the new rows are real tokens, after checking that the mask fits the cache."""
    past = layer.columns if new else layer.columns - rows
    check_width(real, past, rows)
    forward = layer.forward
    if new and layer.leads and forward is not None and not (forward.agreed or forward.recorded):
        layer.ledger.follow(real[:, :past])
    return real[:, -rows:]


def _check(
    module: torch.nn.Module,
    layer: Offloaded,
    pending: Offloaded | None,
    mask: Any,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    if kwargs["dropout"]:
        raise OasisUnsupportedError(
            f"{name}: got attention dropout {kwargs['dropout']}, expected 0: the model is in "
            "training mode; call model.eval() to generate"
        )
    if pending is not None and pending is not layer:
        raise OasisUnsupportedError(
            f"{name}: attention of layer {layer.layer_idx} follows the update of layer "
            f"{pending.layer_idx}, whose attention never ran"
        )
    causal = kwargs.get("is_causal")
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise OasisUnsupportedError(f"{name}: attention is not causal; OasisCache only decodes")
    if kwargs.get("sliding_window") is not None:
        raise OasisUnsupportedError(
            f"{name}: a sliding window on a layer whose cache is not sliding is not implemented"
        )
    if mask is None:
        raise OasisUnsupportedError(
            f"{name}: no mask reached an OasisCache layer, so padding would go unnoticed; the "
            "model does not build its masks with Transformers' create_causal_mask"
        )
    if not isinstance(mask, OasisMask):
        raise OasisUnsupportedError(
            f"{name}: a custom mask (4D, packed sequences, or a bidirectional prefix) reached an "
            "OasisCache layer; pass a 2D attention_mask of ones and zeros"
        )


def register() -> None:
    """Make `attn_implementation="oasis"` known to Transformers. Changes nothing else."""
    AttentionInterface.register(NAME, oasis_attention)
    AttentionMaskInterface.register(NAME, oasis_mask)
