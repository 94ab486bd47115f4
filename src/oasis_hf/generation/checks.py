"""What batched speculation refuses, before it reads anything."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from ..cache import OasisCache
from ..facts import compat
from ..facts.handle import OasisUnsupportedError
from ..facts.wrappers import adds_tokens
from ..layers import rounds
from .speculation import Speculation


def check_model(model: Any, draft: Any, config: Any, kwargs: dict[str, Any]) -> None:
    """Refuse modes of generation that this loop does not have."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams: got {config.num_beams}, expected 1; beams take no drafts, use "
            "model.generate without custom_generate"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(
                f"{name}: got True, expected False; a round has rows that are rejected, use "
                "model.generate without custom_generate"
            )
    if adds_tokens(getattr(model.prepare_inputs_for_generation, "__self__", None)):
        raise OasisUnsupportedError(
            "model: its active adapter puts tokens of its own before the prompt, which this loop "
            "does not feed; use model.generate without custom_generate"
        )
    known = {*compat.CACHE_KWARGS, "attention_mask", "position_ids", "logits_to_keep", "use_cache"}
    strange = sorted(k for k, value in kwargs.items() if value is not None and k not in known)
    if strange or model.config.is_encoder_decoder:
        got = ", ".join(strange) or "an encoder-decoder model"
        raise ValueError(
            f"generate: got {got}, expected token ids and an attention mask of a decoder-only "
            "model; use model.generate without custom_generate"
        )
    if draft is None:
        return
    sizes = [compat.text_config(own.config).vocab_size for own in (model, draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft: got a model with {sizes[1]} tokens in its vocabulary, expected {sizes[0]}; "
            "drafts must be tokens of the model, use a draft of the same family"
        )


def check_caches(
    model: Any, cache: Any, draft: Any, draft_cache: Any, speculation: Speculation
) -> None:
    """Refuse caches from which single rows cannot be taken back, and drafts too long for one."""
    for name, own, owner in (
        ("past_key_values", cache, model),
        ("draft_cache", draft_cache, draft),
    ):
        if own is None and name == "draft_cache":
            continue
        if not isinstance(own, OasisCache | DynamicCache):
            raise ValueError(
                f"{name}: got {type(own).__name__}, expected an OasisCache or a DynamicCache"
            )
        if owner is None:
            raise ValueError(f"{name}: got a cache without a draft model; pass draft too")
        stuck = sorted({type(x).__name__ for x in own.layers if not rounds.movable(x)})
        if stuck:
            raise OasisUnsupportedError(
                f"{name}: {', '.join(stuck)} cannot take back tokens of single sequences; use "
                "model.generate without custom_generate for this model"
            )
    length = speculation.draft_length
    if isinstance(cache, OasisCache) and length >= cache.oasis_config.max_rows:
        most = cache.oasis_config.max_rows
        raise ValueError(
            f"draft length: got {length}, expected at most {most - 1}; a verification has one row "
            f"more, and OasisCache(max_rows={most}) keeps that many unverified rows; draft fewer "
            f"or raise max_rows to {length + 1}"
        )


def check_batch(
    ids: Tensor,
    real: Tensor,
    cache: Any,
    draft: Any,
    draft_cache: Any,
    processors: Any,
    streamer: Any,
) -> None:
    """Refuse inputs that do not fit together."""
    batch, columns = ids.shape[0], real.shape[1]
    past = cache.get_seq_length()
    if columns <= past or columns - past > ids.shape[1]:
        raise ValueError(
            f"input_ids: got {ids.shape[1]} columns under a mask of {columns}, with {past} in the "
            f"cache; expected between {columns - past} and {columns}, at least one of them new; "
            "pass the whole text with a mask of its length"
        )
    if not bool(real[:, -1].all()):
        row = int((~real[:, -1]).nonzero()[0])
        raise ValueError(
            f"attention_mask: row {row} ends with padding, expected left padding; set "
            "tokenizer.padding_side = 'left'"
        )
    if streamer is not None and batch > 1:
        raise ValueError(f"streamer: got a batch of {batch}, expected 1; leave it out")
    for one in processors:
        if compat.keeps_state(one):
            raise ValueError(
                f"logits_processor: got {type(one).__name__}, expected processors that depend on "
                "the tokens before alone; this one counts its calls, and drafts are processed too; "
                "use model.generate without custom_generate"
            )
    if batch > 1 and any(compat.asks_by_row(one) for one in processors):
        raise ValueError(
            f"prefix_allowed_tokens_fn: got a batch of {batch}, expected 1; rows have "
            "different lengths, and it would be asked about rows cut short or padded"
        )
    if draft is not None:
        behind = 0 if draft_cache is None else draft_cache.get_seq_length()
        if columns - behind > ids.shape[1] or columns <= behind:
            raise ValueError(
                f"draft_cache: holds {behind} columns of {columns}, and input_ids gives "
                f"{ids.shape[1]}; pass the whole text, or the draft_cache of the turn before"
            )
