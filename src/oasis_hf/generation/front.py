"""`generate`: its two ways in, what it refuses, and its output."""

from __future__ import annotations

import functools
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache import OasisCache
from ..facts import compat
from ..facts.wrappers import served_model
from ..integration.attention import NAME
from ..integration.turns import turn
from .checks import check_batch, check_caches, check_model
from .decoder import Decoder
from .drafting import Drafter, ModelDrafter, PromptLookup
from .loop import Loop
from .speculation import Speculation, SpeculationReport
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
    `custom_generate` function, so the second way takes the draft as `draft`, and no streamer. It
    warns where nothing to draft with arrives; `speculation=Speculation(0)` says that this is meant.

    Args:
        model: the model whose tokens are wanted.
        inputs: `[B, P]` token ids of the prompts, left-padded.
        input_ids: the same, by the name that tokenizers use.
        generation_config: Transformers' settings; `prompt_lookup_num_tokens` and
            `num_assistant_tokens` among them.
        logits_processor: more processors. Each row is processed with its own tokens before it; a
            processor must not count on being called once per token.
        stopping_criteria: more criteria. Each is asked about one row, `[1, L]`, and one new token
            at a time, without scores.
        streamer: takes the new tokens, for a batch of one.
        assistant_model: the draft model, which shares the model's vocabulary.
        draft: the same; one of the two.
        draft_cache: the draft's cache, an `OasisCache` or `DynamicCache`. By default a new one:
            bounded as the model's is, if the draft's attention is "oasis" too; a `DynamicCache`
            otherwise.
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
    if isinstance(draft, torch.nn.Module):
        # Of a wrapper it does not show what its forward takes.
        draft = served_model(draft)
    inputs = input_ids if inputs is None else inputs
    bound = {"draft": draft, "draft_cache": draft_cache, "speculation": speculation}
    if compat.is_prepared(generation_config):
        # Called by `model.generate`, which may have kept a draft to itself.
        if draft is None and speculation is None and not generation_config.prompt_lookup_num_tokens:
            _warn_of_no_drafts()
        assert inputs is not None
        return _generate(
            model,
            inputs,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            **bound,
            **kwargs,
        )
    stopping_criteria = _with_stop_strings(stopping_criteria, kwargs)
    # A model whose own `generate` was replaced by this one must not come back here. Some wrappers
    # have none of their own.
    owner: Any = model if hasattr(type(model), "generate") else served_model(model)
    return type(owner).generate(
        owner,
        inputs,
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        streamer=streamer,
        custom_generate=functools.partial(_generate, streamer=streamer, **bound),
        **kwargs,
    )


def _warn_of_no_drafts() -> None:
    """Say that nothing is drafted, where a draft may have been lost on the way."""
    warnings.warn(
        "custom_generate: no source of drafts arrived, so every token is decoded by itself. "
        "Transformers does not hand assistant_model on to a function given as custom_generate: "
        "pass it as draft=..., or prompt_lookup_num_tokens=...; speculation=Speculation(0) says "
        "that no drafts are wanted",
        # Whoever called `model.generate`, below torch's no_grad.
        stacklevel=5,
    )


def _generate(
    model: Any,
    inputs: Tensor,
    *,
    generation_config: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    streamer: Any = None,
    draft: Any = None,
    draft_cache: Any = None,
    speculation: Speculation | None = None,
    **kwargs: Any,
) -> Any:
    """`generate`, once Transformers has prepared its arguments."""
    cache = compat.cache_of(kwargs)
    real = _mask(inputs, kwargs, generation_config)
    speculation = _speculation(speculation, draft, generation_config)
    check_model(model, draft, generation_config, kwargs)
    if draft is not None and draft_cache is None and speculation.draft_length:
        draft_cache = _draft_cache(draft, cache)
    check_caches(model, cache, draft, draft_cache, speculation)
    with ExitStack() as turns:
        for held in (cache, draft_cache):
            if isinstance(held, OasisCache):
                turns.enter_context(turn(held, inputs, real))
        check_batch(inputs, real, cache, draft, draft_cache, logits_processor, streamer)
        stops = Stops(stopping_criteria, generation_config.max_length)
        text = Text(inputs, real[:, -inputs.shape[1] :], compat.pad_token(generation_config))
        processors, sample = Processors(logits_processor), bool(generation_config.do_sample)
        piece = generation_config.prefill_chunk_size
        drafter: Drafter | None = None
        if draft is not None and speculation.draft_length:
            follower = Decoder(draft, draft_cache)
            follower.read(inputs, real, piece)
            drafter = ModelDrafter(follower, processors, sample)
        elif generation_config.prompt_lookup_num_tokens and speculation.draft_length:
            drafter = PromptLookup(generation_config.max_matching_ngram_size or 2)
        target = Decoder(model, cache)
        logits = target.read(inputs, real, piece)
        keep: tuple[str, ...] = ()
        if generation_config.return_dict_in_generate:
            wanted = {"scores": "output_scores", "logits": "output_logits"}
            keep = tuple(name for name, flag in wanted.items() if getattr(generation_config, flag))
        speculation.start(inputs.shape[0])
        loop = Loop(target, drafter, text, processors, stops, speculation, sample, streamer, keep)
        loop.run(logits)
    if not generation_config.return_dict_in_generate:
        return text.sequences()
    return _output(loop, real, cache)


def _draft_cache(draft: Any, cache: Any) -> Any:
    """A cache for a draft: of the model's budget where the draft can have one."""
    if compat.attention_name(compat.text_config(draft.config)) != NAME:
        return compat.StepwiseCache(config=compat.text_config(draft.config))
    options = {"budget": cache.oasis_config.budget} if isinstance(cache, OasisCache) else {}
    return OasisCache(draft, **options)


def _with_stop_strings(criteria: Any, kwargs: dict[str, Any]) -> Any:
    """Criteria with those of `stop_strings`, which Transformers could not build without the
    tokenizer that it does not hand on.
    """
    tokenizer, strings = kwargs.pop("tokenizer", None), kwargs.get("stop_strings")
    if tokenizer is None or strings is None:
        return criteria
    del kwargs["stop_strings"]
    own = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    return StoppingCriteriaList([*(criteria or []), own])


def _output(loop: Loop, real: Tensor, cache: Any) -> SpeculativeOutput:
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
            f"speculation: got {type(given).__name__}, expected oasis_hf.generation.Speculation"
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
