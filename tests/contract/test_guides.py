"""The code of every guide runs, on tiny models under the names that the guides use."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers import MODELS, SMALL, build_model
from packaging.specifiers import SpecifierSet

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
FENCE = re.compile(
    r"(?:<!-- needs transformers(?P<needs>\S+) -->\n)?"
    r"^```python(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NAMES = ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Block:
    """One block of code of a page, with the line that it begins at."""

    code: str
    line: int
    file: str | None
    needs: str | None


def blocks(page: Path) -> list[Block]:
    """The Python code of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            match["code"],
            text.count("\n", 0, match.start("code")),
            match["title"],
            match["needs"],
        )
        for match in FENCE.finditer(text)
    ]


def tokenizer() -> Any:
    """One token for each byte, and those that the chat template uses."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    words = {word: number for number, word in enumerate([*special, *alphabet])}
    own = Tokenizer(models.BPE(vocab=words, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder with a tiny model and a tokenizer, for each name in the guides."""
    words = tokenizer()
    size = {"vocab_size": len(words), "max_position_embeddings": 16384}
    found = {}
    for seed, name in enumerate(NAMES):
        folder = tmp_path_factory.mktemp("model")
        stem, options = MODELS["llama"]
        model = build_model(stem, SMALL | options | size, seed=seed)
        model.generation_config.eos_token_id = words.eos_token_id
        model.save_pretrained(folder)
        words.save_pretrained(folder)
        found[name] = str(folder)
    return found


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem) for p in sorted(GUIDES.glob("*.md")) if blocks(p)]
)
def test_the_code_of_a_guide_runs(
    page: Path, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # More than any budget of the guides, so that attention is sparse.
    lines = (f"Line {number} of the report says little.\n" for number in range(80))
    Path("report.txt").write_text("".join(lines), encoding="utf-8")
    known, space = set(sys.modules), {"__name__": page.stem}
    try:
        for block in blocks(page):
            if block.needs and transformers.__version__ not in SpecifierSet(block.needs):
                continue
            code = block.code
            for name, folder in folders.items():
                code = code.replace(name, folder)
            if block.file:
                Path(block.file).write_text(code, encoding="utf-8")
            else:
                # Errors name the page and its line.
                exec(compile("\n" * block.line + code, str(page), "exec"), space)
    finally:
        for name in set(sys.modules) - known:
            if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
                sys.modules[name].__file__
            ):
                del sys.modules[name]


def test_every_name_in_the_guides_is_replaced() -> None:
    for page in GUIDES.glob("*.md"):
        code = "\n".join(block.code for block in blocks(page))
        assert set(re.findall(r"\"([\w-]+/[\w.-]+)\"", code)) <= set(NAMES), page.name
