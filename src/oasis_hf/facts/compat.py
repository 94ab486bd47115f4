"""Every fact about a Transformers version that this package relies on.

Supported: transformers >= 5.17, < 6. Since 5.24 the forward argument that carries the cache is
`cache`; before, it was `past_key_values`. Both are looked for everywhere.
"""

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.modeling_layers import GradientCheckpointingLayer

DEFAULT_ASSISTANT_TOKENS = 20
"""What `generate` fills in, for drafts that stop by themselves when they are unsure."""

CACHE_KWARGS = ("cache", "past_key_values")


def cache_kwarg(model: torch.nn.Module) -> str:
    """Name of the forward argument of `model` that takes a cache."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_KWARGS if name in parameters), "past_key_values")


def takes_cache(model: torch.nn.Module) -> bool:
    """Whether the forward of `model` has an argument for a cache."""
    parameters = inspect.signature(model.forward).parameters
    return any(name in parameters for name in CACHE_KWARGS)


def withholds_cache(model: torch.nn.Module) -> bool:
    """Whether checkpointed layers of `model` would run without the cache that it is given.

    In training mode; since 5.24 only where gradients are recorded.
    """
    if not model.training:
        return False
    always = "__call__" in vars(GradientCheckpointingLayer)
    if not always and not torch.is_grad_enabled():
        return False
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    return any(layer.gradient_checkpointing and layer.training for layer in layers)


def columns_to_crop(asked: Any, held: int) -> int:
    """What `crop(asked)` removes from a cache of `held` columns, as 0 or a negative number.

    A positive number is the length to keep. Early versions (5.17 among them) take it with a
    warning; later ones refuse it.

    Raises:
        ValueError: not a whole number, or a positive one where Transformers takes none.
    """
    try:
        count = operator.index(asked)
    except TypeError as error:
        raise ValueError(
            f"crop: got {asked!r}, expected a whole number, 0 or negative: how many tokens to "
            "remove"
        ) from error
    if count <= 0:
        return count
    try:
        DynamicLayer().crop(count)
    except ValueError as error:
        raise ValueError(
            f"crop: got {count}, expected 0 or a negative number of tokens to remove; to keep "
            f"{count} tokens use crop({count} - cache.get_seq_length())"
        ) from error
    return min(0, count - held)


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a forward call, or None."""
    return next((kwargs[name] for name in CACHE_KWARGS if kwargs.get(name) is not None), None)


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's config of a possibly composite one."""
    return config.get_text_config(decoder=True)


def attention_name(config: PreTrainedConfig) -> str | None:
    """The attention implementation that a config asks for."""
    return getattr(text_config(config), "_attn_implementation", None)


def bypasses_attention(config: PreTrainedConfig) -> bool:
    """Whether a model's own code attends without asking for the attention implementation.

    Transformers accepts every registered name for such a model, and says nothing. Answered from
    the module of the model, once that is imported; False if it cannot be found.
    """
    module = _modeling(config)
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return False
    return any("Attention" in own.__name__ for own in _classes(module))


def refuses_sdpa(config: PreTrainedConfig) -> bool:
    """Whether a model is one that Transformers does not run with sdpa; False if it is not found."""
    module = _modeling(config)
    models = [own for own in _classes(module) if issubclass(own, PreTrainedModel)] if module else []
    return bool(models) and not any(getattr(x, "_supports_sdpa", True) for x in models)


def slices_masks(config: PreTrainedConfig) -> bool:
    """Whether a model may cut rows off its masks, so that there has to be a mask to cut.

    Gemma 4 does since 5.24, and knows by name only that sdpa and flash attention cannot have it.
    """
    return bool(vars(text_config(config)).get("num_kv_shared_layers"))


def _modeling(config: PreTrainedConfig) -> ModuleType | None:
    """The module of a config's decoder, if it is imported."""
    name = type(text_config(config)).__module__.replace(".configuration_", ".modeling_")
    return sys.modules.get(name)


@functools.cache
def _classes(module: ModuleType) -> list[type]:
    """The classes that a module defines itself."""
    members = list(vars(module).values())
    return [x for x in members if isinstance(x, type) and x.__module__ == module.__name__]


def asks_for_more(config: PreTrainedConfig) -> bool:
    """Whether a config has every forward return more than logits and the cache, or no names."""
    names = ("output_hidden_states", "output_attentions", "output_router_logits")
    configs = (config, text_config(config))
    return any(
        any(getattr(x, name, False) for name in names) or not getattr(x, "return_dict", True)
        for x in configs
    )


def follows_length(config: PreTrainedConfig) -> bool:
    """Whether a model's rotary embedding is chosen anew for the positions of each forward.

    Transformers reads these on the host, so such a forward cannot be captured as a graph.
    """
    rope = getattr(text_config(config), "rope_parameters", None) or {}
    # One for all layers, or one for each type of layer.
    found = [rope, *(x for x in rope.values() if isinstance(x, Mapping))]
    kinds = [str(x.get("rope_type", "")) for x in found]
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def weight_bytes(model: torch.nn.Module) -> dict[torch.device, int]:
    """Bytes of weights that a decode step reads, by device.

    All but the input embeddings, of which it reads a row a token, unless they are the output's too.
    Of experts it may read fewer.
    """
    found: dict[torch.device, int] = {}
    for parameter in model.parameters():
        found[parameter.device] = found.get(parameter.device, 0) + parameter.nbytes
    embeddings = _embedding(model, "get_input_embeddings")
    if embeddings is not None and embeddings is not _embedding(model, "get_output_embeddings"):
        found[embeddings.device] -= embeddings.nbytes
    return found


def _embedding(model: torch.nn.Module, getter: str) -> torch.Tensor | None:
    """The weight of a model's input or output embeddings, if it has one."""
    try:
        weight = getattr(getattr(model, getter)(), "weight", None)
    except (AttributeError, NotImplementedError):
        return None
    return weight if isinstance(weight, torch.nn.Parameter) else None


def is_prepared(generation_config: Any) -> bool:
    """Whether `generate` has filled in a config, as it does before it calls a decoding function."""
    return hasattr(generation_config, "_pad_token_tensor")


def pad_token(generation_config: Any) -> int:
    """What a prepared config pads ended rows with; anything where no row can end early."""
    token = generation_config._pad_token_tensor
    return 0 if token is None else int(token)


def assistant_tokens(generation_config: Any) -> int | None:
    """Tokens to draft that a user asked for, or None: `generate` fills in a number of its own."""
    number = generation_config.num_assistant_tokens
    return None if number == DEFAULT_ASSISTANT_TOKENS else number


def mask_length(generation_config: Any) -> int | None:
    """Columns of an attention mask of ones that `generate` (5.24 and later) left out."""
    return getattr(generation_config, "_mask_length", None)


def output_cache_name() -> str:
    """The field of generation's output that holds the cache."""
    # Not needed to load a model, so not imported with this package.
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    names = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
    return next(name for name in CACHE_KWARGS if name in names)


def asks_by_row(processor: Any) -> bool:
    """Whether a logits processor asks its user about every row of a batch."""
    return type(processor).__name__ == "PrefixConstrainedLogitsProcessor"


def keeps_state(processor: Any) -> bool:
    """Whether a logits processor of Transformers counts on being called once per token."""
    return type(processor).__name__ in (
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    )


def native_layers(config: PreTrainedConfig) -> list[Any]:
    """One Transformers cache layer per model layer, of the kind that the model expects."""
    return list(DynamicCache(config=text_config(config)).layers)


def is_full_attention(layer: Any) -> bool:
    """Whether a native layer caches plain full attention, which is what this package offloads."""
    return type(layer) is DynamicLayer


def is_sliding(layer: Any) -> bool:
    """Whether a native layer is bounded by a sliding window."""
    return type(layer) is DynamicSlidingWindowLayer


def visible(layer: Any, rows: int, *states: Any) -> tuple[Any, Any]:
    """What a sliding layer's mask covers of the K and V `[B, H, L, D]` that its update returned.

    A layer that records its past, for a crop that may come, returns all of it in early versions.
    """
    k, v = (state[:, :, -(layer.sliding_window - 1 + rows) :] for state in states)
    return k, v


def fills_window(layer: Any) -> bool:
    """Whether a sliding layer holds all that its window covers.

    Cropped by more tokens than it recorded, it holds less, and Transformers says nothing.
    """
    held = layer.keys.shape[-2] if layer.is_initialized else 0
    return held >= min(layer.sliding_window - 1, layer.get_seq_length())


class StepwiseCache(DynamicCache):
    """A `DynamicCache` that takes several forwards before its newest tokens are cropped.

    Early versions return more of a sliding layer than its mask covers.
    """

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """K and V `[B, H, L, D]` that the forward's mask covers."""
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        return visible(layer, key_states.shape[2], *states) if is_sliding(layer) else states


def is_linear(layer: Any) -> bool:
    """Whether a native layer holds only recurrent state."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(
        layer, CacheLayerMixin
    )


def detach_states(layer: Any) -> None:
    """Free the states of a recurrent layer, which models write to themselves, from gradients."""
    for states in (layer.conv_states, layer.recurrent_states):
        for number, state in states.items():
            if state is not None and state.requires_grad:
                states[number] = state.detach()


def is_placeholder(layer: Any) -> bool:
    """Whether a native layer (5.23 and later) stands for a model layer that caches nothing."""
    return type(layer).__name__ == "DummyLayer"


__all__ = [
    "CACHE_KWARGS",
    "Cache",
    "CacheLayerMixin",
    "DynamicLayer",
    "StepwiseCache",
    "asks_by_row",
    "assistant_tokens",
    "attention_name",
    "bypasses_attention",
    "cache_kwarg",
    "cache_of",
    "columns_to_crop",
    "detach_states",
    "fills_window",
    "is_full_attention",
    "is_linear",
    "is_placeholder",
    "is_prepared",
    "is_sliding",
    "keeps_state",
    "mask_length",
    "native_layers",
    "output_cache_name",
    "pad_token",
    "refuses_sdpa",
    "slices_masks",
    "takes_cache",
    "text_config",
    "visible",
    "weight_bytes",
    "withholds_cache",
]
