"""Prompts in pieces whose arguments are more than token ids: each goes to its own tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    SMALL,
    assert_close,
    cache_argument,
    dense_cache,
    generate,
    left_padded,
    prompt,
    tiny_model,
)
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from oasis_hf import OasisCache

IMAGE, START, END = 100, 102, 103
PIECE = 16


def llava() -> tuple[PreTrainedModel, dict[str, Any]]:
    """A tiny random LLaVA, and one image of four tokens."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    config = LlavaConfig(
        text_config=LlamaConfig(**SMALL),
        vision_config=vision,
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    attention = {"text_config": "oasis", "vision_config": "sdpa"}
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation=attention)
    return model.eval(), {"pixel_values": torch.randn(1, 3, 16, 16)}


def qwen2_vl() -> tuple[PreTrainedModel, dict[str, Any]]:
    """A tiny random Qwen2-VL, whose positions have three dimensions, and one image."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2VLConfig(
        text_config=SMALL | {"rope_parameters": rope},
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": SMALL["hidden_size"],
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 1,
            "mlp_ratio": 2,
        },
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    attention = {"text_config": "oasis", "vision_config": "sdpa"}
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration._from_config(config, attn_implementation=attention)
    return model.eval(), {
        "pixel_values": torch.randn(16, 48),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def text_ids(length: int) -> torch.Tensor:
    """`[1, length]` ids of plain text, none of them an image's."""
    return prompt(length).where(prompt(length) < IMAGE, 50)


MODELS = {"llava": llava, "qwen2_vl": qwen2_vl}


@pytest.mark.parametrize("kind", MODELS)
def test_prompt_with_an_image_is_read_whole_and_says_so(kind: str) -> None:
    model, image = MODELS[kind]()
    model.generation_config.eos_token_id = None
    ids = text_ids(60)
    ids[:, 10], ids[:, 11:15], ids[:, 15] = START, IMAGE, END
    image["mm_token_type_ids"] = (ids == IMAGE).int() if kind == "qwen2_vl" else None
    want = generate(model, ids, dense_cache(model), **image)
    with pytest.warns(UserWarning, match="prefill_chunk_size: got a prompt with .*all 60"):
        got = generate(model, ids, OasisCache(model, prefill_chunk_size=PIECE, **FULL), **image)
    assert torch.equal(got, want)


def test_turn_of_text_after_an_image_is_read_in_pieces() -> None:
    """Positions of several dimensions are cut along their last axis."""
    model, image = qwen2_vl()
    model.generation_config.eos_token_id = None
    first = text_ids(30)
    first[:, 10], first[:, 11:15], first[:, 15] = START, IMAGE, END
    image["mm_token_type_ids"] = (first == IMAGE).int()
    lengths: list[int] = []
    tokens = []
    for cache in (dense_cache(model), OasisCache(model, prefill_chunk_size=PIECE, **FULL)):
        name = cache_argument(model)
        with torch.no_grad():
            model(input_ids=first, logits_to_keep=1, **{name: cache}, **image)
            watch = model.model.language_model.register_forward_pre_hook(
                lambda module, args, kwargs: lengths.append(kwargs["inputs_embeds"].shape[1]),
                with_kwargs=True,
            )
            positions = torch.arange(20, 60).expand(3, 1, -1)
            more = text_ids(40)
            out = model(input_ids=more, position_ids=positions, logits_to_keep=1, **{name: cache})
            watch.remove()
        tokens.append(out.logits)
    assert lengths == [40, 16, 16, 8]
    assert_close(tokens[1], tokens[0])


def test_embeddings_are_read_in_pieces() -> None:
    model = tiny_model("llama")
    ids, mask = left_padded([0, 7], 60)
    embeddings = model.get_input_embeddings()(ids).detach()
    lengths: list[int] = []
    watch = model.model.layers[0].register_forward_pre_hook(
        lambda module, args: lengths.append(args[0].shape[1])
    )
    try:
        cache = OasisCache(model, prefill_chunk_size=PIECE, **FULL)
        got = generate(model, ids[:, :0], cache, 4, inputs_embeds=embeddings, attention_mask=mask)
    finally:
        watch.remove()
    want = generate(model, ids, dense_cache(model), 4, attention_mask=mask)
    assert lengths[:4] == [16, 16, 16, 12]
    assert torch.equal(got, want)


@pytest.mark.parametrize("over_all", [False, True], ids=["of new tokens", "of all tokens"])
def test_types_of_tokens_are_cut_with_them(over_all: bool) -> None:
    """Also where they cover the columns held, as a mask does."""
    model, _ = qwen2_vl()
    seen: list[torch.Tensor] = []
    cache = OasisCache(model, prefill_chunk_size=PIECE, **FULL)
    name = cache_argument(model)
    ids, held = text_ids(60), 20
    positions = torch.arange(60).expand(3, 1, -1)
    types = torch.arange(60)[None]
    watch = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["mm_token_type_ids"]), with_kwargs=True
    )
    call: dict[str, Any] = {name: cache, "logits_to_keep": 1}
    with torch.no_grad():
        model(
            input_ids=ids[:, :held],
            position_ids=positions[..., :held],
            mm_token_type_ids=types[:, :held],
            **call,
        )
        seen.clear()
        model(
            input_ids=ids[:, held:],
            position_ids=positions[..., held:],
            mm_token_type_ids=types if over_all else types[:, held:],
            **call,
        )
    watch.remove()
    first = 0 if over_all else held
    ends = (36, 52, 60)
    starts = (0, 0, 0) if over_all else (20, 36, 52)
    assert [x.tolist() for x in seen] == [
        [list(range(max(start, first), end))] for start, end in zip(starts, ends, strict=True)
    ]


def test_images_are_kept_with_tokens_that_are_fed_again() -> None:
    """What generate feeds again is taken back, where it cannot be cut off the call."""
    model, image = llava()
    model.generation_config.eos_token_id = None
    ids = text_ids(60)
    ids[:, 20:24] = IMAGE
    want = generate(model, ids, dense_cache(model), 6, **image)
    cache = OasisCache(model, **FULL)
    with torch.no_grad():
        model(input_ids=ids[:, :30], **{cache_argument(model): cache}, **image)
    got = generate(model, ids, cache, 6, prompt_lookup_num_tokens=3, **image)
    assert torch.equal(got, want)
