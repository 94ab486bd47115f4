"""A saved cache is read by the model that made it, whole, or refused with a reason."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from helpers import (
    FULL,
    MODELS,
    SMALL,
    build_model,
    cache_argument,
    forward,
    generate,
    left_padded,
    prompt,
    tiny_model,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.integrations import peft as integration

from oasis_hf import OasisCache, SavedCacheError
from oasis_hf.facts.handle import OasisUnsupportedError
from oasis_hf.saving.checksum import checksum
from oasis_hf.saving.fingerprint import adapter_state, fingerprint
from oasis_hf.saving.identity import describe, difference
from oasis_hf.saving.placement import layer_devices
from oasis_hf.saving.savefile import Saved, SavedFile, write

pytestmark = pytest.mark.usefixtures("small_slabs")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}


def save(model: Any, path: Path, **options: Any) -> Path:
    """A cache of 60 tokens of `model`, on disk."""
    cache = OasisCache(model, **(FULL | options))
    forward(model, prompt(60), cache)
    cache.save(path / "cache.safetensors")
    return path / "cache.safetensors"


def sibling(kind: str, **changes: Any) -> Any:
    """A tiny model with the weights of another one and a config that differs."""
    stem, options = MODELS[kind]
    model = build_model(stem, options | changes)
    model.load_state_dict(tiny_model(kind).state_dict())
    return model


def refused(path: Path, model: Any, *parts: str, **options: Any) -> None:
    """Assert that a file is not loaded, why, and that the model is left as it was."""
    hooks = dict(model._forward_hooks), dict(model._forward_pre_hooks), sorted(vars(model))
    with pytest.raises(SavedCacheError) as error:
        OasisCache.load(path, model, **options)
    for part in ("saved cache: got", *parts):
        assert part in str(error.value)
    del error
    assert hooks == (model._forward_hooks, model._forward_pre_hooks, sorted(vars(model)))


# ---- the model: its config -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("llama", {"rope_parameters": YARN}, "rope_parameters.rope_type='default'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_parameters.rope_theta=10000.0",
        ),
        ("llama", {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='silu'"),
        ("llama", {"max_position_embeddings": 8192}, "max_position_embeddings=4096"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=2"),
        ("gemma3", {"sliding_window": 50}, "sliding_window=40"),
        ("gemma3", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar=16"),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_a_model_that_computes_with_the_same_weights_otherwise(
    kind: str, changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    path = save(tiny_model(kind), tmp_path)
    refused(path, sibling(kind, **changes), name, "read the prompt again")


@pytest.mark.parametrize(
    "change",
    [
        {"use_cache": False},
        {"name_or_path": "elsewhere"},
        {"attention_dropout": 0.1},
        {"initializer_range": 0.5},
        {"eos_token_id": 7},
        {"architectures": ["Another"]},
        {"dtype": "float16"},
        {"transformers_version": "5.99.0"},
    ],
    ids=str,
)
def test_a_model_whose_config_differs_in_nothing_of_meaning(
    change: dict[str, Any], tmp_path: Path
) -> None:
    model = sibling("llama")
    path = save(model, tmp_path)
    for name, value in change.items():
        setattr(model.config, name, value)
    assert OasisCache.load(path, model).get_seq_length() == 60


def test_a_field_that_one_version_lacks_means_its_default() -> None:
    """As a file is read that another version of Transformers wrote."""
    config = transformers.LlamaConfig(**SMALL)
    here = describe(config)
    for name in ("rms_norm_eps", "attention_bias", "rope_parameters.rope_type"):
        other = copy.deepcopy(here)
        del other["values"][name], other["defaults"][name]
        assert difference(other, here) is None, "the file is the older one"
        assert difference(here, other) is None, "the file is the newer one"
        changed = copy.deepcopy(here)
        changed["values"][name] = "something else"
        assert difference(other, changed) == (name, None, "something else")
        assert difference(changed, other) == (name, "something else", None)


def test_rotary_embeddings_that_were_replaced_in_the_model_alone(tmp_path: Path) -> None:
    model = sibling("llama")
    path = save(model, tmp_path)
    scaled = sibling("llama", rope_parameters=YARN)
    model.model.rotary_emb = scaled.model.rotary_emb
    refused(path, model, "frequencies of the rotary embedding")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 64,
            "factor": 4.0,
        },
    ],
    ids=lambda x: x["rope_type"],
)
def test_a_model_that_scales_positions_as_a_text_grows_is_the_same_before_and_after(
    rope: dict[str, Any],
) -> None:
    model = build_model("Llama", {"rope_parameters": rope, "max_position_embeddings": 64})
    before, buffers = fingerprint(model), model.model.rotary_emb.inv_freq.clone()
    model(prompt(200))
    assert not torch.equal(buffers, model.model.rotary_emb.inv_freq), "the test is to the point"
    after = fingerprint(model)
    assert after.same_rope(before) and after.weights == before.weights


# ---- the model: its weights ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_moe"])
def test_every_single_weight_counts(kind: str) -> None:
    """One element of any one parameter or buffer is another model."""
    model = sibling(kind)
    whole = fingerprint(model)
    assert fingerprint(sibling(kind)) == whole
    seen = {whole.weights}
    for number, tensor in enumerate(model.state_dict().values()):
        place = (7919 * number) % tensor.numel()
        kept = tensor.flatten()[place].clone()
        tensor.view(-1)[place] = torch.nextafter(kept, torch.tensor(9.0))
        seen.add(fingerprint(model).weights)
        tensor.view(-1)[place] = kept
    assert fingerprint(model) == whole
    assert len(seen) == 1 + len(model.state_dict())


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "o_proj"])
def test_a_fine_tune_of_one_projection(name: str, tmp_path: Path) -> None:
    path = save(tiny_model("llama"), tmp_path)
    model = sibling("llama")
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, name).weight[3, 5] += 0.25
    refused(path, model, "got weights", "other weights", "read the prompt again")


def test_two_layers_that_changed_places() -> None:
    model = sibling("llama")
    before = fingerprint(model)
    first, second = (layer.self_attn.k_proj for layer in model.model.layers)
    first.weight, second.weight = second.weight, first.weight
    assert fingerprint(model).weights != before.weights


def test_rows_of_a_weight_that_changed_places() -> None:
    weight = torch.randn(64, 96)
    assert checksum(weight) != checksum(weight.flip(0))
    assert checksum(weight) != checksum(weight.flip(1))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (700, 13), (1021, 64)], ids=str)
def test_a_checksum_is_of_the_contents_alone(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Wherever in memory and however laid out, and for every kind of number."""
    tensor = torch.randint(0, 2, shape).to(dtype)
    want = checksum(tensor)
    room = torch.zeros(tensor.numel() + 1, dtype=dtype)
    room[1:] = tensor.flatten()
    assert checksum(room[1:].view(shape)) == want, "not aligned"
    if len(shape) == 2:
        assert checksum(tensor.t().contiguous().t()) == want, "transposed"
    other = tensor.clone().flatten()
    other[-1] = 0 if other[-1].item() else 1
    assert checksum(other.view(shape)) != want


class Packed(nn.Module):
    """As quantised linear modules are: packed codes and scales in buffers, a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qweight = nn.Buffer(torch.arange(40, dtype=torch.uint8).view(5, 8))
        self.scales = nn.Buffer(torch.ones(5, dtype=torch.float16))
        self.zeros = nn.Buffer(torch.zeros(5, dtype=torch.int32))
        self.state = {"absmax": torch.ones(3)}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "state"] = self.state


def test_weights_of_quantisers_count_with_their_scales() -> None:
    found = set()
    for change in (None, "qweight", "scales", "zeros", "state"):
        module = Packed()
        if change == "state":
            module.state["absmax"][1] = 2
        elif change is not None:
            getattr(module, change).view(-1)[-1] += 1
        found.add(fingerprint(module).weights)
    assert len(found) == 5


def test_weights_of_a_tensor_class_of_its_own_count_with_all_their_parts() -> None:
    """As torchao's quantised tensors, and those that are distributed."""
    from torch.testing._internal.two_tensor import TwoTensor

    def model(a: float, b: float) -> nn.Module:
        module = nn.Linear(4, 4)
        parts = (torch.full((4, 4), a), torch.full((4, 4), b))
        module.weight = nn.Parameter(TwoTensor(*parts), requires_grad=False)
        module.bias = nn.Parameter(torch.zeros(4))
        return module

    one = fingerprint(model(1, 2)).weights
    assert fingerprint(model(1, 2)).weights == one
    assert len({one, fingerprint(model(2, 2)).weights, fingerprint(model(1, 1)).weights}) == 3


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights_are_read_where_they_are_kept(place: str, tmp_path: Path) -> None:
    """The model has meta tensors then; it is the same model as in memory."""
    whole, model = tiny_model("llama"), sibling("llama")
    if place == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path / "weights"), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert fingerprint(model) == fingerprint(whole)
    assert layer_devices(model, 2) == [torch.device("cpu")] * 2
    path = save(model, tmp_path)
    want = generate(whole, prompt(60), OasisCache(whole, **FULL))
    for other in (model, whole):
        assert torch.equal(generate(other, prompt(60), OasisCache.load(path, other)), want)
    changed = sibling("llama")
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    cpu_offload(changed, execution_device=torch.device("cpu"))
    refused(path, changed, "other weights")


def test_a_model_whose_weights_have_other_names_in_another_version(tmp_path: Path) -> None:
    """The same weights by other names are the same model, if another version wrote the file."""
    path, renamed = save(tiny_model("llama"), tmp_path), sibling("llama")
    renamed.lm_head.register_parameter("other_name", renamed.lm_head.weight)
    del renamed.lm_head.weight
    refused(path, renamed, "other weights")
    file = SavedFile(path).read()
    write(Saved(**{**vars(file), "transformers": "5.99.0"}), path)
    assert OasisCache.load(path, renamed).get_seq_length() == 60
    with torch.no_grad():
        renamed.lm_head.other_name[0, 0] += 1
    refused(path, renamed, "other weights")


# ---- the model: adapters -------------------------------------------------------------------------


@pytest.fixture
def lora() -> Any:
    """A tiny Llama with two adapters, of which the first is active."""
    peft = pytest.importorskip("peft")
    chosen = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    torch.manual_seed(3)
    model = peft.get_peft_model(sibling("llama"), peft.LoraConfig(**chosen), adapter_name="first")
    model.add_adapter("second", peft.LoraConfig(**chosen))
    return model.eval()


def rescale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)


CHANGES = {
    "another": lambda model: model.set_adapter("second"),
    "both": lambda model: model.base_model.set_adapter(["first", "second"]),
    "none": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "scaled": rescale,
    "unloaded": lambda model: model.unload(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_adapters_in_effect_belong_to_the_model(change: str, lora: Any, tmp_path: Path) -> None:
    inner = lora.get_base_model()
    path, state = save(inner, tmp_path), adapter_state(inner)
    assert OasisCache.load(path, inner).get_seq_length() == 60
    CHANGES[change](lora)
    assert adapter_state(inner) != state
    refused(path, inner, "adapter", "read the prompt again")


def test_adapters_that_are_not_in_effect_do_not(lora: Any, tmp_path: Path) -> None:
    """A prompt read without them is the plain model's, and the other way round."""
    path = save(tiny_model("llama"), tmp_path)
    with lora.disable_adapter():
        assert OasisCache.load(path, lora.get_base_model()).get_seq_length() == 60
    inner = lora.get_base_model()
    path = save(inner, tmp_path)
    lora.delete_adapter("second")
    assert OasisCache.load(path, inner).get_seq_length() == 60
    lora.merge_adapter()
    merged = save(inner, tmp_path)
    assert OasisCache.load(merged, lora.merge_and_unload()).get_seq_length() == 60


def test_an_adapters_weights_count(lora: Any, tmp_path: Path) -> None:
    inner = lora.get_base_model()
    path = save(inner, tmp_path)
    with torch.no_grad():
        inner.model.layers[1].self_attn.v_proj.lora_B["second"].weight[0, 0] += 1
    assert OasisCache.load(path, inner).get_seq_length() == 60, "it is not active"
    with torch.no_grad():
        inner.model.layers[1].self_attn.v_proj.lora_B["first"].weight[0, 0] += 1
    refused(path, inner, "other weights")


def test_a_prompt_that_was_read_with_other_adapters_is_not_saved_as_these(
    lora: Any, tmp_path: Path
) -> None:
    """Nor what was copied of it."""
    model = lora.get_base_model()
    cache = OasisCache(model, **FULL)
    forward(model, prompt(60), cache)
    lora.set_adapter("second")
    for one in (cache, copy.deepcopy(cache), cache.fork()):
        with pytest.raises(OasisUnsupportedError, match="save: got tokens that were read with"):
            one.save(tmp_path / "cache")
        assert not (tmp_path / "cache").exists()
    lora.set_adapter("first")
    cache.save(tmp_path / "cache")
    loaded = OasisCache.load(tmp_path / "cache", model)
    lora.set_adapter("second")
    with pytest.raises(OasisUnsupportedError, match="save: got tokens that were read with"):
        loaded.save(tmp_path / "cache")
    loaded.reset()
    forward(model, prompt(60), loaded)
    loaded.save(tmp_path / "cache")


def test_a_wrapper_and_the_model_in_it_are_one(lora: Any, tmp_path: Path) -> None:
    inner = lora.get_base_model()
    cache = OasisCache(lora, **FULL)
    forward(inner, prompt(60), cache)
    cache.save(tmp_path / "cache")
    for model in (inner, lora, torch.compile(inner)):
        assert OasisCache.load(tmp_path / "cache", model).get_seq_length() == 60


def test_the_adapters_of_transformers_own_integration(tmp_path: Path) -> None:
    # Its integration asks for a newer peft than its other uses do.
    needs = getattr(integration, "MIN_PEFT_VERSION", None)
    peft = pytest.importorskip("peft", minversion=needs)
    path, model = save(tiny_model("llama"), tmp_path), sibling("llama")
    assert adapter_state(model) == ()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["k_proj"]), adapter_name="mine")
    state = adapter_state(model)
    assert state
    refused(path, model, "got no adapter", "mine")
    model.disable_adapters()
    assert adapter_state(model) != state
    assert OasisCache.load(path, model).get_seq_length() == 60


# ---- what is held --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "wanted"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("from_config", [False, True], ids=["model", "config"])
def test_a_model_of_another_dtype(
    saved: torch.dtype, wanted: torch.dtype, from_config: bool, tmp_path: Path
) -> None:
    model, path = sibling("llama").to(saved), tmp_path / "cache"
    cache = OasisCache(model.config if from_config else model, **FULL)
    forward(model, prompt(60), cache)
    cache.save(path)
    other = sibling("llama").to(wanted)
    refused(
        path, other, f"dtype {saved}", f"expected {wanted}", f"load the model with dtype={saved}"
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"head_dim": 32}, "head_dim=16"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=2"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=2"),
    ],
    ids=str,
)
def test_a_model_of_another_shape(change: dict[str, Any], name: str, tmp_path: Path) -> None:
    refused(save(tiny_model("llama"), tmp_path), build_model("Llama", change), name)


def test_other_dense_layers_than_those_saved(tmp_path: Path) -> None:
    path = save(tiny_model("llama"), tmp_path, dense_layers=(1,))
    refused(path, sibling("llama"), "layer 1 as dense", "dense_layers", "[1]", dense_layers=())
    loaded = OasisCache.load(path, tiny_model("llama"))
    assert loaded.get_seq_length() == 60


def test_weights_that_nobody_noted_cannot_be_checked_and_that_is_said(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = OasisCache(model.config, **FULL)
    forward(model, prompt(60), cache)
    cache.save(tmp_path / "cache")
    with pytest.warns(UserWarning, match="built from a config"):
        loaded = OasisCache.load(tmp_path / "cache", model)
    assert loaded.get_seq_length() == 60
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OasisCache.load(tmp_path / "cache", model.config)


# ---- the file ------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A batch with padding in a hybrid model: every kind of tensor that a file may have."""
    model, path = tiny_model("gemma3"), tmp_path / "cache.safetensors"
    cache = OasisCache(model, **FULL)
    ids, mask = left_padded([0, 20], 60)
    forward(model, ids, cache, mask)
    cache.save(path)
    return path


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_file(share: float, saved: Path) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(share * len(data))])
    refused(saved, tiny_model("gemma3"), "not safetensors", str(saved))


@pytest.mark.parametrize("place", [0.1, 0.5, 0.8, 0.999])
def test_a_bit_that_flipped(place: float, saved: Path) -> None:
    """In K or V, where a file is as valid as before."""
    data = bytearray(saved.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + int(place * (len(data) - header))] ^= 4
    saved.write_bytes(bytes(data))
    refused(saved, tiny_model("gemma3"), "is damaged or was changed")


@pytest.mark.parametrize(
    "name", ["0.k", "0.v", "1.k", "1.v", "1.lengths"], ids=lambda x: f"without {x}"
)
def test_a_missing_tensor(name: str, saved: Path) -> None:
    tensors, header = contents(saved)
    del tensors[name]
    save_file(tensors, str(saved), metadata=header)
    refused(saved, tiny_model("gemma3"), f"no tensor {name}", "is damaged")


WRONG = {
    "fewer tokens": ("1.k", lambda t: t[:, :, :-1].contiguous()),
    "fewer sequences": ("1.v", lambda t: t[:1].contiguous()),
    "fewer heads": ("0.v", lambda t: t[:, :1].contiguous()),
    "more tokens than columns": ("0.k", lambda t: t.repeat(1, 1, 2, 1)),
    "three dimensions": ("0.k", lambda t: t[0].contiguous()),
    "whole numbers": ("1.k", lambda t: t.long()),
    "another dtype": ("1.v", lambda t: t.bfloat16()),
    "longer sequences": ("1.lengths", lambda t: t + 1),
    "lengths of floats": ("1.lengths", lambda t: t.float()),
    "other padding": ("real", lambda t: ~t),
    "padding of other columns": ("real", lambda t: t[:, 1:].contiguous()),
    "one number": ("1.lengths", lambda t: t.sum()),
    "other ids": ("ids", lambda t: t + 1),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_tensor_that_does_not_fit(what: str, saved: Path) -> None:
    tensors, header = contents(saved)
    name, change = WRONG[what]
    tensors[name] = change(tensors[name])
    save_file(tensors, str(saved), metadata=header)
    refused(saved, tiny_model("gemma3"), "is damaged or was changed", str(saved))


@pytest.mark.parametrize("field", ["model", "options", "columns", "layers", "seal"])
@pytest.mark.parametrize("text", [None, "{", "[3]"], ids=["missing", "no JSON", "a list"])
def test_a_header_that_cannot_be_read(field: str, text: str | None, saved: Path) -> None:
    tensors, header = contents(saved)
    header.pop(field)
    if text is not None:
        header[field] = text
    save_file(tensors, str(saved), metadata=header)
    refused(saved, tiny_model("gemma3"))


def test_a_strange_tensor(saved: Path) -> None:
    tensors, header = contents(saved)
    save_file(tensors | {"2.k": torch.zeros(2)}, str(saved), metadata=header)
    refused(saved, tiny_model("gemma3"), "a tensor 2.k")


def test_a_file_of_the_format_before(saved: Path) -> None:
    tensors, header = contents(saved)
    save_file(tensors, str(saved), metadata=header | {"format": "oasis-hf-cache/1"})
    refused(saved, tiny_model("gemma3"), "'oasis-hf-cache/1'", "earlier version", "save it")


@pytest.mark.parametrize("kind", ["gemma3", "llama"])
def test_a_cache_saved_over_the_file_that_it_came_from(kind: str, tmp_path: Path) -> None:
    """What a file is mapped to must not change under the cache, nor the file under its reader."""
    model = tiny_model(kind)
    path = save(model, tmp_path, **({"dense_layers": (0,)} if kind == "llama" else {}))
    want = forward(model, prompt(1), OasisCache.load(path, model))
    loaded = OasisCache.load(path, model)
    other = OasisCache(model, **FULL)
    forward(model, prompt(200, seed=9), other)
    other.save(path)
    loaded.save(path)
    assert torch.equal(forward(model, prompt(1), loaded), want)
    assert torch.equal(forward(model, prompt(1), OasisCache.load(path, model)), want)


def test_a_save_that_fails_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oasis_hf.saving import savefile

    model = tiny_model("llama")
    path = save(model, tmp_path)
    before = path.read_bytes()

    def break_off(tensors: Any, name: str, **options: Any) -> None:
        Path(name).write_bytes(before[:100])
        raise OSError("no space left on device")

    monkeypatch.setattr(savefile, "save_file", break_off)
    with pytest.raises(OSError, match="no space left"):
        OasisCache.load(path, model).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a path in a folder that exists"):
        OasisCache(tiny_model("llama"), **FULL).save(tmp_path / "none" / "cache")


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_an_empty_cache(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    want = generate(model, prompt(), OasisCache(model, **FULL))
    fresh, used = (OasisCache(model, **FULL) for _ in range(2))
    forward(model, prompt(10), used)
    used.crop(-10)
    for cache in (fresh, used):
        cache.save(tmp_path / "cache")
        loaded = OasisCache.load(tmp_path / "cache", model)
        assert loaded.get_seq_length() == 0
        assert torch.equal(generate(model, prompt(), loaded), want)


def test_what_was_said_is_remembered_across_a_file(tmp_path: Path) -> None:
    """A text that was rewritten meanwhile is noticed, as without the file."""
    model = tiny_model("llama")
    path = save(model, tmp_path)
    rewritten = torch.cat([prompt(60), prompt(20, seed=6)], 1)
    rewritten[0, 40] += 1
    loaded = OasisCache.load(path, model)
    with pytest.warns(UserWarning, match="from token 40 on"):
        got = generate(model, rewritten, loaded)
    assert torch.equal(got, generate(model, rewritten, OasisCache(model, **FULL)))


@pytest.mark.parametrize("what", ["save", "fork"])
def test_a_forward_that_was_interrupted_is_undone_first(what: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    forward(model, prompt(60), cache)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, prompt(9, seed=2), cache)
    handle.remove()
    if what == "save":
        cache.save(tmp_path / "cache")
        got = OasisCache.load(tmp_path / "cache", model)
    else:
        got = cache.fork()
    assert got.get_seq_length() == 60
    ids = torch.cat([prompt(60), prompt(5, seed=3)], 1)
    assert torch.equal(generate(model, ids, got), generate(model, ids, OasisCache(model, **FULL)))


def test_a_cache_that_cannot_be_made_whole_is_not_forked_as_one() -> None:
    """A recurrent state that a broken forward has changed cannot be taken back."""
    model = tiny_model("qwen3_next")
    cache = OasisCache(model, **FULL)
    forward(model, prompt(60), cache)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, prompt(9, seed=2), cache)
    handle.remove()
    with pytest.raises(OasisUnsupportedError, match=r"cache\.reset\(\)"):
        cache.fork()


def test_a_file_is_read_by_another_process(tmp_path: Path) -> None:
    """Nothing of a fingerprint depends on the process: not on addresses, nor on hashes of names."""
    model = tiny_model("gemma3")
    code = (
        "import sys, json; from helpers import tiny_model; "
        "from oasis_hf.saving.fingerprint import fingerprint; "
        "from oasis_hf.saving.identity import describe; m = tiny_model('gemma3'); "
        "print(json.dumps([fingerprint(m).as_json(), describe(m.config)]))"
    )
    path = [str(Path(__file__).parents[1]), *sys.path]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout.splitlines()[-1]) == [
        fingerprint(model).as_json(),
        describe(model.config),
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "qwen3_moe"])
def test_a_saved_prompt_goes_on_as_a_fresh_reading(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    ids, mask = left_padded([0, 37], 120)
    cache = OasisCache(model, **FULL)
    forward(model, ids, cache, mask)
    cache.save(tmp_path / "cache")
    longer = torch.cat([ids, prompt(6, 2, seed=4)], 1)
    seen = torch.cat([mask, torch.ones(2, 6, dtype=torch.long)], 1)
    options = {cache_argument(model): OasisCache.load(tmp_path / "cache", model)}
    got = model.generate(longer, attention_mask=seen, max_new_tokens=20, do_sample=False, **options)
    want = generate(model, longer, OasisCache(model, **FULL), 20, attention_mask=seen)
    assert torch.equal(got[:, longer.shape[1] :], want)
