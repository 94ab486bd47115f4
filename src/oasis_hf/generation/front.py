"""`generate`: its two ways in, what it refuses, and its output."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .. import compat, rounds
from ..cache import OasisCache
from ..handle import OasisUnsupportedError
from ..speculation import Speculation, SpeculationReport
from .decoder import Decoder
from .drafting import Drafter, ModelDrafter, PromptLookup
from .loop import Loop
from .text import Processors, Stops, Text

DRAFT_LENGTH = 5
"""Tokens drafted per round, where neither the call nor the draft's own settings say."""


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Transformers' output, and more.

    Attributes:
        attention_mask: `[B, L]` of `sequences`: zeros for padding on either side. A second turn on
            the same cache appends to both.
        speculation: what drafts did.
    """

    attention_mask: Tensor | None = None
    speculation: SpeculationReport | None = None


def generate(
    model: Any,
    inputs: Tensor | None = None,
    *,
    input_ids: Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    streamer: Any = None,
    assistant_model: Any = None,
    draft: Any = None,
    draft_cache: Any = None,
    speculation: Speculation | None = None,
    **kwargs: Any,
) -> Any:
    """Generate with drafts for every row of a batch.

    ```python
    oasis_hf.generation.generate(model, **inputs, past_key_values=cache, assistant_model=draft)
    model.generate(**inputs, past_key_values=cache, custom_generate=generate, draft=draft)
    ```

    Both are the same. Transformers does not hand `assistant_model`, `streamer` and `tokenizer` to a
    `custom_generate` function, so the second way takes the draft as `draft`, and no streamer.

    Args:
        model: the model whose tokens are wanted.
        inputs: `[B, P]` token ids of the prompts, left-padded.
        input_ids: the same, by the name that tokenizers use.
        generation_config: Transformers' settings; `prompt_lookup_num_tokens` and
            `num_assistant_tokens` among them.
        logits_processor: more processors. Each row is processed with its own tokens before it.
        stopping_criteria: more criteria. Each is asked about one row, `[1, L]`, and one new token
            at a time, without scores.
        streamer: takes the new tokens, for a batch of one.
        assistant_model: the draft model, which shares the model's vocabulary.
        draft: the same; one of the two.
        draft_cache: the draft's cache, an `OasisCache` or `DynamicCache`; a new one by default.
        speculation: how many tokens to draft, and when not to; by default a fixed number:
            `prompt_lookup_num_tokens`; or `num_assistant_tokens` of the call or of the model (but
            for 20, which Transformers fills in itself), or of the draft; or 5.
        **kwargs: anything else that `model.generate` takes. Positions follow from the mask.

    Returns:
        `[B, L]` ids, or a `SpeculativeOutput` with `return_dict_in_generate`.

    Raises:
        ValueError: an argument that cannot be used; nothing is read before that.
        OasisUnsupportedError: a model or cache that cannot take single rows back.
    """
    if draft is not None and assistant_model is not None and draft is not assistant_model:
        raise ValueError(
            "draft: got a model, and another one as assistant_model; expected one of them, pass "
            "only assistant_model"
        )
    draft = assistant_model if draft is None else draft
    inputs = input_ids if inputs is None else inputs
    if not compat.is_prepared(generation_config):
        bound = {"draft": draft, "draft_cache": draft_cache, "speculation": speculation}
        # A model whose own `generate` was replaced by this one must not come back here.
        return type(model).generate(
            model,
            inputs,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            custom_generate=functools.partial(generate, streamer=streamer, **bound),
            **kwargs,
        )
    assert inputs is not None
    cache = compat.cache_of(kwargs)
    real = _mask(inputs, kwargs, generation_config)
    speculation = _speculation(speculation, draft, generation_config)
    _check_model(model, draft, generation_config, kwargs)
    _check_caches(model, cache, draft, draft_cache, speculation)
    _check_batch(inputs, real, cache, draft, draft_cache, logits_processor, streamer)
    stops = Stops(stopping_criteria, generation_config.max_length)
    text = Text(inputs, real[:, -inputs.shape[1] :], compat.pad_token(generation_config))
    processors, sample = Processors(logits_processor), bool(generation_config.do_sample)
    target = Decoder(model, cache)
    logits = target.read(inputs, real, generation_config.prefill_chunk_size)
    drafter: Drafter | None = None
    if draft is not None and speculation.draft_length:
        if draft_cache is None:
            draft_cache = compat.StepwiseCache(config=compat.text_config(draft.config))
        follower = Decoder(draft, draft_cache)
        follower.read(inputs, real, generation_config.prefill_chunk_size)
        drafter = ModelDrafter(follower, processors, sample)
    elif generation_config.prompt_lookup_num_tokens and speculation.draft_length:
        drafter = PromptLookup(generation_config.max_matching_ngram_size or 2)
    keep: tuple[str, ...] = ()
    if generation_config.return_dict_in_generate:
        wanted = {"scores": "output_scores", "logits": "output_logits"}
        keep = tuple(name for name, flag in wanted.items() if getattr(generation_config, flag))
    speculation.start()
    loop = Loop(target, drafter, text, processors, stops, speculation, sample, streamer, keep)
    loop.run(logits)
    if not generation_config.return_dict_in_generate:
        return text.sequences()
    return _output(model, loop, real, cache)


def _output(model: Any, loop: Loop, real: Tensor, cache: Any) -> SpeculativeOutput:
    text = loop.text
    number = torch.arange(int(text.generated.max()), device=text.device)
    new = number < text.on_device(text.generated)[:, None]
    return SpeculativeOutput(
        sequences=text.sequences(),
        scores=loop.steps("scores"),
        logits=loop.steps("logits"),
        attention_mask=torch.cat([real, new], 1).long(),
        speculation=loop.speculation.report(),
        **{compat.output_cache_name(): cache},
    )


def _mask(ids: Tensor, kwargs: dict[str, Any], config: Any) -> Tensor:
    """`[B, C]` bool over everything that the cache holds, and the new tokens."""
    given = kwargs.get("attention_mask")
    if given is not None:
        return given.bool()
    columns = compat.mask_length(config) or ids.shape[1]
    return torch.ones(ids.shape[0], columns, dtype=torch.bool, device=ids.device)


def _speculation(given: Speculation | None, draft: Any, config: Any) -> Speculation:
    if given is not None and not isinstance(given, Speculation):
        raise ValueError(
            f"speculation: got {type(given).__name__}, expected oasis_hf.speculation.Speculation"
        )
    lookup = config.prompt_lookup_num_tokens
    if draft is not None and lookup:
        raise ValueError(
            f"prompt_lookup_num_tokens: got {lookup} together with a draft model, expected one "
            "source of drafts; leave one out"
        )
    if given is not None:
        if given.draft_length and draft is None and not lookup:
            raise ValueError(
                f"speculation: got draft_length={given.draft_length} and nothing to draft with, "
                "expected a draft model or prompt_lookup_num_tokens; pass one of them"
            )
        return given
    if draft is None:
        return Speculation(lookup or 0)
    own = getattr(draft, "generation_config", None)
    lengths = (compat.assistant_tokens(config), getattr(own, "num_assistant_tokens", None))
    return Speculation(next((n for n in lengths if n is not None), DRAFT_LENGTH))


def _check_model(model: Any, draft: Any, config: Any, kwargs: dict[str, Any]) -> None:
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


def _check_caches(
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


def _check_batch(
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
    if batch > 1 and any(compat.knows_rows(one) for one in processors):
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
