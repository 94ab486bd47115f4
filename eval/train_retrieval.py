"""Trains a small model that finds facts at 32K to 128K tokens, and says how well it does.

Offline no larger model with such a context can be had. This one has real attention over all of it:
a few layers, grouped heads, rotary positions, trained on facts in noise until it answers nearly all
questions. Short sequences with skipped positions teach it the distances of long ones; a few long
sequences at the end teach it to be sharp among many keys.

    python eval/train_retrieval.py                    # on one GPU, about 4 minutes
    python eval/train_retrieval.py --tiny             # on a CPU, to see that it learns

Writes a model folder with tokenizer, and `recipe.json`: stages, losses, accuracy by length and the
checksum of the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from oasis_eval.environment import describe
from oasis_eval.recall import Batch, Words, draw, tokenizer

HALF, ENOUGH = 0.5, 0.999
"""Share of right answers with which there are more words, and with which, at four looks in a row, a
stage ends."""
SPAN = 131_072
TINY_SPAN = 4_096


@dataclass(frozen=True)
class Stage:
    """Part of the training.

    Attributes:
        length: tokens of a sequence.
        rows: sequences of a batch.
        steps: batches, at most.
        rate: highest learning rate.
        facts: most facts in a sequence.
        queries: most questions of a sequence.
        seconds: the stage ends after so long, with what it has learnt.
    """

    length: int
    rows: int
    steps: int
    rate: float
    facts: int
    queries: int
    seconds: float


STAGES = [
    Stage(256, 256, 8000, 2e-3, 32, 16, 120),
    Stage(1024, 64, 2000, 1e-3, 128, 64, 30),
    Stage(4096, 16, 1000, 1e-3, 512, 128, 30),
    Stage(16384, 4, 500, 5e-4, 768, 256, 30),
    Stage(65536, 1, 200, 3e-4, 768, 256, 40),
]
TINY = [Stage(64, 16, 6000, 4e-3, 4, 4, 180), Stage(256, 8, 2000, 2e-3, 8, 8, 60)]
FIRST_SHARE = 0.25
"""Of the words, in the beginning: to look for what is equal is learnt sooner among few words, as
long as they are enough that answers do not repeat. Once half is right there are twice as many."""
TOGETHER = 32_768
"""Tokens of a batch of short sequences when accuracy is measured."""
LOOK = 25
"""Steps between looks at how much is right; each waits for the device."""


def build(words: Words, tiny: bool) -> LlamaForCausalLM:
    """An untrained model."""
    size = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4} if tiny else {}
    shape = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8} | size
    config = LlamaConfig(
        vocab_size=words.count,
        intermediate_size=3 * shape["hidden_size"] // 4,
        num_hidden_layers=2 if tiny else 3,
        num_key_value_heads=2,
        max_position_embeddings=2 * SPAN,
        # Some dimensions hardly turn within the span, so that far tokens can be told by what they
        # are; enough others turn fast, which tell neighbours: with 1e9 that is learnt much later.
        rope_parameters={"rope_type": "default", "rope_theta": 1e4 if tiny else 1e7},
        tie_word_embeddings=True,
        # The usual 0.02 is for wide models: here attention would stay uniform for a long time.
        initializer_range=shape["hidden_size"] ** -0.5,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
        **shape,
    )
    return LlamaForCausalLM(config)


def outputs(model: Any, batch: Batch) -> torch.Tensor:
    """Logits `[B, Q, 5, vocabulary]` where something is asked."""
    # With a mask of ones, skipped positions are not taken for sequences packed together.
    hidden = model.model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        attention_mask=torch.ones_like(batch.ids),
        use_cache=False,
    ).last_hidden_state
    index = batch.asked.flatten(1)[..., None].expand(-1, -1, hidden.shape[-1])
    return model.lm_head(hidden.gather(1, index)).unflatten(1, batch.asked.shape[1:])


def autocast(device: torch.device) -> Any:
    """bfloat16 products on a GPU."""
    cuda = device.type == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()


def train(
    model: Any, words: Words, stages: list[Stage], span: int, generator: torch.Generator
) -> list[dict[str, Any]]:
    """Run the stages; returns what was lost, and when."""
    device = generator.device
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), fused=device.type == "cuda")
    history: list[dict[str, Any]] = []
    # On the host: a step does not wait for the device.
    amount, share = Random(generator.initial_seed()), FIRST_SHARE
    for stage in stages:
        started, looks = time.perf_counter(), []
        for step in range(stage.steps):
            spent = max(step / stage.steps, (time.perf_counter() - started) / stage.seconds)
            if spent >= 1 or (share == 1 and len(looks) >= 4 and min(looks[-4:]) >= ENOUGH):
                break
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * min(1, (step + 1) / 50, 0.1 + 1.5 * (1 - spent))
            # From few facts among much noise to as many as there may be.
            least = math.log(stage.queries)
            facts = round(math.exp(least + amount.random() * (math.log(stage.facts) - least)))
            size = (stage.rows, stage.length, facts, stage.queries)
            natural = step % 4 == 3
            batch = draw(words, *size, generator, 0 if natural else span, share)
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
                looks.append((logits.argmax(-1) == batch.answers).all(-1).float().mean().item())
                look = {"length": stage.length, "step": step, "share": round(share, 3)}
                look |= {"loss": round(loss.item(), 4), "right": round(looks[-1], 4)}
                look["seconds"] = round(time.perf_counter() - started, 1)
                history.append(look)
                if step % (4 * LOOK) == 0:
                    print(", ".join(f"{name} {value}" for name, value in look.items()), flush=True)
                if looks[-1] > HALF:
                    share = min(1.0, 2 * share)
    return history


@torch.inference_mode()
def accuracy(
    model: Any, words: Words, lengths: list[int], generator: torch.Generator, tokens: int
) -> list[dict[str, Any]]:
    """Share of questions answered right in full, at natural positions, by length and facts."""
    found = []
    for length in lengths:
        for facts in (16, min(words.keys, length // 12)):
            right: list[float] = []
            rows = max(1, TOGETHER // length)
            for _ in range(-(-tokens // (rows * length))):
                batch = draw(words, rows, length, facts, 16, generator)
                with autocast(generator.device):
                    logits = outputs(model, batch)
                right.append((logits.argmax(-1) == batch.answers).all(-1).float().mean().item())
            share = sum(right) / len(right)
            asked = batch.asked.shape[1] * rows * len(right)
            found.append({"length": length, "facts": facts, "asked": asked, "right": share})
            print(f"{length} tokens, {facts} facts: {share:.4f} of {asked} right", flush=True)
    return found


def main(
    out: Path = typer.Option(Path("retrieval-model"), help="Folder of the model."),
    seed: int = typer.Option(0),
    tiny: bool = typer.Option(False, help="A smaller model and shorter contexts, for a CPU."),
    scale: float = typer.Option(1.0, help="Factor of the seconds of every stage."),
) -> None:
    """Train, measure and save."""
    device = torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu")
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    words = Words(64, 128, 32) if tiny else Words()
    stages, span = (TINY, TINY_SPAN) if tiny else (STAGES, SPAN)
    stages = [Stage(**(asdict(s) | {"seconds": s.seconds * scale})) for s in stages]
    model = build(words, tiny).to(device).train()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.2f} million parameters on {device}", flush=True)
    started = time.perf_counter()
    history = train(model, words, stages, span, generator)
    trained = time.perf_counter() - started
    # Saved before it is measured, and measured as it was saved.
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(out)
    tokenizer(words).save_pretrained(out)
    weights = (out / "model.safetensors").read_bytes()
    about = describe(model)
    lengths = [256, 1024, 4096] if tiny else [1024, 8192, 32768, 65536, 131072]
    tokens = 1 << 15 if tiny else 1 << 20
    measured = accuracy(model.float(), words, lengths, generator, tokens)
    recipe = {
        "command": f"python eval/train_retrieval.py --seed {seed} --scale {scale}",
        "seed": seed,
        "span": span,
        "words": asdict(words),
        "parameters": count,
        "stages": [asdict(stage) for stage in stages],
        "seconds": round(trained, 1),
        "sha256": hashlib.sha256(weights).hexdigest(),
        "accuracy": measured,
        "history": history,
        "about": about,
    }
    (out / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    print(f"written to {out}: {len(weights) / 1e6:.1f} MB, sha256 {recipe['sha256'][:12]}")


if __name__ == "__main__":
    typer.run(main)
