"""Which models the cache serves, and which cache layer each model layer gets."""

import math
from typing import Any

from transformers import PreTrainedConfig

from ..config import OasisConfig, OasisConfigError
from ..facts import compat
from ..facts.handle import BYPASS, OasisUnsupportedError
from ..misses import MissPolicy
from ..step.read_ahead import ReadAhead
from ..storage.link import Allowance
from .dense_layer import DenseLayer
from .layer import OasisLayer
from .ledger import PaddingLedger


def refusal(config: PreTrainedConfig) -> str | None:
    """Why a model with this config cannot be served, or None; more may show when it runs."""
    text = compat.text_config(config)
    kind = getattr(config, "model_type", "model")
    if getattr(config, "is_encoder_decoder", False):
        return f"{kind}: encoder-decoder models are not supported"
    if compat.bypasses_attention(config):
        return f"{kind}: {BYPASS}"
    if vars(text).get("kv_lora_rank"):
        return f"{kind}: multi-head latent attention caches latents, not K and V"
    if getattr(text, "is_causal", True) is False:
        return f"{kind}: attention is not causal"
    if vars(text).get("cross_attention_layers"):
        return f"{kind}: layers of cross-attention are not supported"
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        return f"{kind}: chunked attention is not implemented"
    try:
        layers = compat.native_layers(config)
    except Exception as error:
        return (
            f"{kind}: Transformers builds no DynamicCache for it ({type(error).__name__}: {error})"
        )
    for number, layer in enumerate(layers):
        known = (
            compat.is_full_attention(layer)
            or compat.is_sliding(layer)
            or compat.is_linear(layer)
            or compat.is_placeholder(layer)
        )
        if not known:
            return f"{kind}: layer {number} needs a {type(layer).__name__}, which is not supported"
    if not any(compat.is_full_attention(layer) for layer in layers):
        return f"{kind}: no layer has full attention, so there is nothing to offload"
    return None


def build_layers(
    model_config: PreTrainedConfig,
    config: OasisConfig,
    ledger: PaddingLedger,
    allowance: Allowance | None = None,
) -> list[Any]:
    """The layers of a cache: offloaded where attention is full, Transformers' own elsewhere.

    Args:
        model_config: the model's.
        config: choices of the cache.
        ledger: shared by its layers.
        allowance: shared by its offloaded layers.

    Raises:
        OasisUnsupportedError: the model cannot be served, with the reason.
        OasisConfigError: `dense_layers` names a layer that does not exist, or leaves none to
            offload.
    """
    reason = refusal(model_config)
    if reason is not None:
        raise OasisUnsupportedError(reason)
    layers = compat.native_layers(model_config)
    wrong = [number for number in config.dense_layers if number >= len(layers)]
    if wrong:
        raise OasisConfigError(
            f"dense_layers: got {wrong}, expected numbers below {len(layers)}, the model's layers"
        )
    ours = [n for n, layer in enumerate(layers) if compat.is_full_attention(layer)]
    offloaded = [n for n in ours if n not in config.dense_layers]
    if not offloaded:
        raise OasisConfigError(
            f"dense_layers: got {list(config.dense_layers)}, expected at least one layer with full "
            f"attention (of {ours}) to be left out; to keep all on the device use DynamicCache"
        )
    ahead = ReadAhead()
    for number in ours:
        leads = number == ours[0]
        if number in offloaded:
            left = len(offloaded) - offloaded.index(number)
            above = _threshold(config.misses, number, len(layers))
            layers[number] = OasisLayer(
                config, number, ledger, leads, left, allowance, ahead, above
            )
        else:
            layers[number] = DenseLayer(number, ledger, leads)
    for number, after in zip(offloaded, [*offloaded[1:], None], strict=True):
        layers[number].following = None if after is None else layers[after]
    return layers


def _threshold(policy: MissPolicy, number: int, layers: int) -> float:
    """What a policy says of a layer.

    Raises:
        OasisConfigError: it is no number.
    """
    found = policy.threshold(number, layers)
    if isinstance(found, bool) or not isinstance(found, int | float) or math.isnan(found):
        raise OasisConfigError(
            f"on_miss: policy {policy.name!r} gave {found!r} for layer {number}, expected a "
            "number, -inf (wait for every missing block) or inf (for none)"
        )
    return found
