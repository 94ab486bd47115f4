"""What a model's config says of its K and V, and how two models differ in it."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedConfig

IRRELEVANT = frozenset(
    {
        # How a model was stored, loaded or is run. Its dtype is told by the weights themselves.
        "architectures",
        "attn_implementation",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "experts_implementation",
        "gradient_checkpointing",
        "quantization_config",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
        # What a forward returns.
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        # Which tokens generation gives or stops at.
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "forced_eos_token_id",
        "max_length",
        "pad_token_id",
        "prefix",
        "sep_token_id",
        "tokenizer_class",
        # Training, and heads for other tasks.
        "attention_dropout",
        "classifier_dropout",
        "embd_pdrop",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "label2id",
        "num_labels",
        "problem_type",
        "resid_pdrop",
        "router_aux_loss_coef",
        "task_specific_params",
    }
)
"""Fields, at any depth, that change no K or V. All others are taken to do so."""


def describe(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """A config as plain values by dotted names.

    Returns:
        Under "values" every field, and under "defaults" those of a config of these classes in which
        nothing was chosen: what a field means that another version does not know.
    """
    values: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    _collect(config, "", values, defaults)
    return {"values": values, "defaults": defaults}


def _collect(
    config: PreTrainedConfig, prefix: str, values: dict[str, Any], defaults: dict[str, Any]
) -> None:
    """Add a config and those within it."""
    _flatten(_own(config), prefix, values)
    try:
        plain = type(config)()
    except Exception:
        # Some configs have no defaults: then a field that is missing elsewhere is a difference.
        pass
    else:
        _flatten(_own(plain), prefix, defaults)
    for name, inner in vars(config).items():
        if isinstance(inner, PreTrainedConfig):
            _collect(inner, f"{prefix}{name}.", values, defaults)


def _own(config: PreTrainedConfig) -> dict[str, Any]:
    """A config's fields, but for the configs within it."""
    inner = {name for name, x in vars(config).items() if isinstance(x, PreTrainedConfig)}
    # Through JSON, as what is compared with it has gone through a file.
    text = json.dumps({k: x for k, x in config.to_dict().items() if k not in inner}, default=_other)
    return json.loads(text)


def _other(value: Any) -> Any:
    """A value that JSON has no form for."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _flatten(fields: dict[str, Any], prefix: str, into: dict[str, Any]) -> None:
    for name, value in fields.items():
        # A name with an underscore is bookkeeping of Transformers.
        if name in IRRELEVANT or name.startswith("_"):
            continue
        if isinstance(value, dict) and value:
            _flatten(value, f"{prefix}{name}.", into)
        else:
            into[prefix + name] = value


def difference(
    saved: dict[str, dict[str, Any]], here: dict[str, dict[str, Any]]
) -> tuple[str, Any, Any] | None:
    """The first field in which two descriptions differ: its name, the saved value and the one here.

    A field that only one of them has is one that the other's version of Transformers does not know:
    it differs unless it is what such a config has by default. None is the same as missing.
    """
    first = ["model_type", *(x for x in here["values"] if x.endswith(".model_type"))]
    names = dict.fromkeys([*first, *here["values"], *saved["values"]])
    for name in names:
        got, want = saved["values"].get(name), here["values"].get(name)
        if got is None and name not in saved["values"]:
            got = here["defaults"].get(name)
        if want is None and name not in here["values"]:
            want = saved["defaults"].get(name)
        if got != want:
            return name, saved["values"].get(name), here["values"].get(name)
    return None
