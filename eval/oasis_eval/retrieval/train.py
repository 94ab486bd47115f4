"""Trains a small model that finds facts at 32K to 128K tokens, and says how well it does.

Offline no larger model with such a context can be had. This one has real attention over all of it:
two layers, grouped heads, rotary positions. It is initialised with a previous-token head and a
matching head (`retrieval.circuit`), then trained on facts in noise, all of its weights. Short
sequences with skipped positions teach it the distances of long ones.

    oasis-hf study retrieval-model                    # on a CPU, some ten minutes
    oasis-hf study retrieval-model --random           # without the heads, to compare

Writes a model folder with tokenizer, and `recipe.json`: how it began, stages, losses, accuracy by
length before and after the training, and the checksum of the weights.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..environment import describe
from ..records import write_json
from .circuit import lay
from .language import Batch, Words, draw, tokenizer

Tell = Callable[[str], None]
"""Told how it goes, a line at a time."""
SPAN = 131_072
INITIALISED = "with a previous-token head and a matching head (retrieval.circuit), then trained"
SMALL = 1e-3
"""Standard deviation of the weights beside the heads, which the usual 0.02 would drown."""
EMBEDDED = 0.02
"""The same of the embeddings."""


@dataclass(frozen=True)
class Stage:
    """Part of the training.

    Attributes:
        length: tokens of a sequence.
        rows: sequences of a batch.
        steps: batches.
        rate: highest learning rate.
        facts: most facts in a sequence.
        queries: most questions of a sequence.
    """

    length: int
    rows: int
    steps: int
    rate: float
    facts: int
    queries: int


STAGES = [
    Stage(256, 16, 80, 5e-5, 20, 12),
    Stage(1024, 4, 30, 5e-5, 80, 32),
    Stage(4096, 1, 10, 5e-5, 340, 64),
]
LENGTHS = (256, 1024, 4096, 8192)
TOGETHER = 8192
"""Tokens of a batch of short sequences when accuracy is measured."""
LOOK = 10
"""Steps between looks at how much is right."""


def build(words: Words, random: bool = False) -> LlamaForCausalLM:
    """An untrained model, with the two heads or with random weights alone."""
    hidden = 256
    config = LlamaConfig(
        vocab_size=words.count,
        hidden_size=hidden,
        intermediate_size=3 * hidden // 4,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2 * SPAN,
        # Half of the dimensions hardly turn within the span, so that far tokens can be told by what
        # they are; the others turn fast enough to tell neighbours.
        rope_parameters={"rope_type": "default", "rope_theta": 1e11},
        tie_word_embeddings=True,
        # At random, the usual 0.02 is for wide models: attention would stay uniform for long.
        initializer_range=hidden**-0.5 if random else SMALL,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    if not random:
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDED)
        lay(model, words, SPAN)
    return model


def outputs(model: Any, batch: Batch) -> torch.Tensor:
    """Logits `[B, Q, 5, vocabulary]` where something is asked."""
    skips = bool((batch.positions[:, -1] >= batch.ids.shape[1]).any())
    hidden = model.model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        # With a mask of ones, skipped positions are not taken for sequences packed together.
        attention_mask=torch.ones_like(batch.ids) if skips else None,
        use_cache=False,
    ).last_hidden_state
    index = batch.asked.flatten(1)[..., None].expand(-1, -1, hidden.shape[-1])
    return model.lm_head(hidden.gather(1, index)).unflatten(1, batch.asked.shape[1:])


def autocast(device: torch.device) -> Any:
    """bfloat16 products on a GPU."""
    cuda = device.type == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()


def rightly(logits: torch.Tensor, batch: Batch) -> float:
    """Share of the questions whose every token is right."""
    return (logits.argmax(-1) == batch.answers).all(-1).float().mean().item()


def train(
    model: Any,
    words: Words,
    stages: list[Stage],
    span: int,
    generator: torch.Generator,
    tell: Tell = print,
) -> list[dict[str, Any]]:
    """Run the stages; returns what was lost, and when."""
    device = generator.device
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), fused=device.type == "cuda")
    history: list[dict[str, Any]] = []
    # On the host: a step does not wait for the device.
    amount = Random(generator.initial_seed())
    for stage in stages:
        started = time.perf_counter()
        for step in range(stage.steps):
            for group in optimizer.param_groups:
                left = 1 - step / stage.steps
                group["lr"] = stage.rate * min(1, (step + 1) / 20, 0.1 + 1.5 * left)
            # From few facts among much noise to as many as there may be.
            least = math.log(stage.queries)
            facts = round(math.exp(least + amount.random() * (math.log(stage.facts) - least)))
            size = (stage.rows, stage.length, facts, stage.queries)
            natural = step % 4 == 3
            batch = draw(words, *size, generator, 0 if natural else span)
            with autocast(device):
                logits = outputs(model, batch)
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 2), batch.answers.flatten()
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % LOOK == 0 or step + 1 == stage.steps:
                look = {"length": stage.length, "step": step, "loss": round(loss.item(), 4)}
                look |= {"right": round(rightly(logits, batch), 4)}
                look["seconds"] = round(time.perf_counter() - started, 1)
                history.append(look)
                tell(", ".join(f"{name} {value}" for name, value in look.items()))
    return history


@torch.inference_mode()
def accuracy(
    model: Any,
    words: Words,
    lengths: Sequence[int],
    generator: torch.Generator,
    asked: int,
    tell: Tell = print,
) -> list[dict[str, Any]]:
    """Share of about `asked` questions answered right in full, at natural positions."""
    found = []
    for length in lengths:
        most = min(words.keys, length // 12)
        for facts in (min(16, most), most):
            right: list[float] = []
            rows = max(1, TOGETHER // length)
            for _ in range(max(1, asked // (rows * min(16, facts)))):
                batch = draw(words, rows, length, facts, 16, generator)
                with autocast(generator.device):
                    right.append(rightly(outputs(model, batch), batch))
            share = sum(right) / len(right)
            count = batch.asked.shape[1] * rows * len(right)
            found.append({"length": length, "facts": facts, "asked": count, "right": share})
            tell(f"{length} tokens, {facts} facts: {share:.4f} of {count} right")
    return found


def make(
    out: Path,
    seed: int = 0,
    random: bool = False,
    device: str = "cpu",
    lengths: Sequence[int] = LENGTHS,
    asked: int = 128,
    tell: Tell = print,
) -> None:
    """Trains the model, measures it and saves it.

    Args:
        out: folder of the model.
        seed: of the weights and of what is drawn.
        random: begin with random weights, without the two heads.
        device: where to train, such as "cuda".
        lengths: tokens at which accuracy is measured.
        asked: questions of a measurement.
        tell: told how it goes, a line at a time.
    """
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    words = Words()
    model = build(words, random).to(device).train()
    count = sum(parameter.numel() for parameter in model.parameters())
    tell(f"{count / 1e6:.2f} million parameters on {device}")
    before = accuracy(model, words, lengths, generator, asked, tell)
    started = time.perf_counter()
    history = train(model, words, STAGES, SPAN, generator, tell)
    trained = time.perf_counter() - started
    # Saved before it is measured, and measured as it was saved.
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(out)
    tokenizer(words).save_pretrained(out)
    weights = (out / "model.safetensors").read_bytes()
    about = describe(model)
    flag = " --random" if random else ""
    recipe = {
        "command": f"oasis-hf study retrieval-model --seed {seed} --device {device}{flag}",
        "initialised": "at random" if random else INITIALISED,
        "seed": seed,
        "span": SPAN,
        "words": asdict(words),
        "parameters": count,
        "stages": [asdict(stage) for stage in STAGES],
        "seconds": round(trained, 1),
        "sha256": hashlib.sha256(weights).hexdigest(),
        "accuracy_initialised": before,
        "accuracy": accuracy(model.float(), words, lengths, generator, asked, tell),
        "history": history,
        "about": about,
    }
    write_json(out / "recipe.json", recipe)
    tell(f"written to {out}: {len(weights) / 1e6:.1f} MB, sha256 {recipe['sha256'][:12]}")
