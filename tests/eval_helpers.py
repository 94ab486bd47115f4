"""Readers by rule, and tokenizers and models small enough to need no download."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oasis_hf.index import OracleIndex

TEXT = "\n\n".join(
    " ".join(
        f"The number{part}x{n} paragraph talks about matters{n} of little weight to anyone."
        for n in range(6)
    )
    for part in range(60)
)


def word_tokenizer() -> Any:
    """One token per word; it only counts."""
    core = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", eos_token="?")


def character_tokenizer() -> Any:
    """One token per character."""
    characters = sorted({*map(chr, range(32, 127)), "\n"})
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", eos_token="~")


def tiny_model() -> Any:
    """A random Llama with two layers."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        # Large weights: attention that is far from uniform.
        initializer_range=0.3,
        attn_implementation="oasis",
    )
    return LlamaForCausalLM(config).eval()


class Backwards(OracleIndex):
    """Knows the true attention, and ranks the blocks that hold least of it first."""

    name = "backwards"
    estimates_mass = False

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        """The negative of the truth."""
        return -super().block_logits(query, live)


def dropping(first: int, last: int) -> type[OracleIndex]:
    """An index that knows the true attention, but never chooses blocks `first` to `last`."""

    class Dropping(OracleIndex):
        name = "dropping"
        estimates_mass = False

        def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
            """The truth without these blocks."""
            logits = super().block_logits(query, live).clone()
            logits[..., first : last + 1] = float("-inf")
            return logits

    return Dropping


def read_perfectly(task: str, text: str, question: str) -> str:
    """The answer that follows from the text, found without the references."""
    if task.startswith(("niah", "needles", "ask")):
        facts = re.findall(r"special magic \w+s for (\S+) is: (\S+)\.", text)
        return ", ".join(value for key, value in facts if re.search(rf"\b{key}\b", question))
    if task.startswith("recall"):
        (key,) = re.findall(r"\? (\w+)", question)
        return re.findall(rf"{key} ((?:v\d+ ?){{4}})<end>", text)[0].strip()
    if task == "vt":
        return _chain(text, question)
    if task == "cwe":
        words = re.findall(r"\d+\. (\S+)", text.rsplit("The 10 most common", 1)[1])
        return " ".join(word for word, _ in Counter(words[10:]).most_common(10))
    if task == "fwe":
        words = text.split("coded text: ")[1].split()
        return " ".join(w for w, _ in Counter(w for w in words if w != "...").most_common(3))
    if task == "qa_1":
        (society,) = re.findall(r"founded the (\S+) society", question)
        return re.findall(rf"The {society} society was founded by (\w+ \w+)", text)[0]
    if task == "qa_2":
        (society,) = re.findall(r"the (\S+) society", question)
        (college,) = re.findall(rf"The {society} society .* of (\S+) college", text)
        return re.findall(rf"{college.capitalize()} college was founded by (\w+ \w+)", text)[0]
    if task == "extraction":
        return _orders(text)
    if task in ("copy", "sort"):
        records = re.findall(r"Record \S+: \d+", text)
        ranked = sorted(records, key=lambda line: int(line.split()[-1]))
        return "\n".join(ranked if task == "sort" else records)
    assert task == "running_total"
    return _totals(text)


def _chain(text: str, question: str) -> str:
    (value,) = re.findall(r"the value (\d+)", question)
    held: dict[str, str] = {}
    for name, given in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        held[name] = held.get(given, given)
    return " ".join(name for name, found in held.items() if found == value)


def _orders(text: str) -> str:
    form = r"Order (\d+): (.+?) of (\S+) bought the article (\w+), quantity (\d+)\."
    return json.dumps(
        [
            dict(order=int(a), name=b, city=c, item=d, quantity=int(e))
            for a, b, c, d, e in re.findall(form, text)
        ]
    )


def _totals(text: str) -> str:
    total, lines = 0, []
    form = r"Step (\d+): (?:the total is set to (\d+)|(\d+) is (taken|added))"
    for step, start, change, way in re.findall(form, text):
        total = int(start) if start else total + int(change) * (1 if way == "added" else -1)
        lines.append(f"Step {step}: {total}")
    return "\n".join(lines)
