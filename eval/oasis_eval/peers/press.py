"""Evicting methods of NVIDIA's kvpress on the prompts of a run of `oasis-hf eval`.

kvpress needs an older Transformers than oasis-hf, so this runs in an environment of its own, and
imports nothing that needs oasis_hf; eval/README.md has the commands. It reads a file of prompts
(`oasis-hf report RUN --prompts FILE`) and writes a folder of answers, which
`oasis-hf report RUN --peers FOLDER` scores and shows. With the folder `eval` on the path:

    python -m oasis_eval.peers --prompts prompts.jsonl --model FOLDER --keep 256,512 --out answers

As our arms do, a method sees all of the prompt but its last token, the question included, in one
dense reading; it keeps the `--keep` best tokens of every KV head and layer, and the answer is
decoded greedily from the last token of the prompt on. Decoded tokens are kept on top.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..records import append_records, identity, read_json, read_records, write_json
from ..runs.stops import ends
from .files import ABOUT, ANSWERS, COMMAND, NEEDED, PROMPT

PRESSES = {
    "snapkv": "SnapKVPress",
    "expected_attention": "ExpectedAttentionPress",
    "streaming_llm": "StreamingLLMPress",
    "knorm": "KnormPress",
    "tova": "TOVAPress",
    "keydiff": "KeyDiffPress",
}
"""Classes of kvpress that keep the same number of tokens in every head, with their defaults."""
INSTALL = "pip install kvpress==0.5.5, in an environment of its own"


class InputError(ValueError):
    """What was given cannot be used; the message names it and the way out."""


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """The prompts that `oasis-hf report RUN --prompts FILE` wrote.

    Raises:
        InputError: the file is not there, or is no such file.
    """
    way_out = "write it with `oasis-hf report RUN --prompts FILE`"
    if not file.is_file():
        raise InputError(f"--prompts: got {file}, expected a file; {way_out}")
    prompts = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            prompt = json.loads(text)
            missing = [name for name in NEEDED if name not in prompt]
        except (json.JSONDecodeError, TypeError):
            raise InputError(f"--prompts: {file}, line {number} is no JSON; {way_out}") from None
        if missing or len(prompt["ids"]) < 2:
            what = f"has no {', '.join(missing)}" if missing else "has no two ids"
            raise InputError(f"--prompts: {file}, line {number} {what}; {way_out}")
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"--prompts: {file} is empty, expected one prompt a line; {way_out}")
    return prompts


def press_names(text: str) -> list[str]:
    """The names in `--presses`.

    Raises:
        InputError: one is unknown.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [text]:
        if name not in PRESSES:
            raise InputError(f"--presses: got {name!r}, expected some of {', '.join(PRESSES)}")
    return list(dict.fromkeys(names))


def budgets(text: str) -> list[int]:
    """The numbers in `--keep`: tokens kept per KV head.

    Raises:
        InputError: one is no positive whole number.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    for part in found or [text]:
        if not part.isdecimal() or int(part) < 1:
            raise InputError(f"--keep: got {part!r}, expected tokens per KV head, such as 256,512")
    return list(dict.fromkeys(map(int, found)))


def ratio(length: int, keep: int) -> float:
    """The share to evict, so that of `length` tokens just `keep` stay after rounding down."""
    return 1 - (keep + 0.5) / length if keep < length else 0.0


def load(folder: str, dtype: str) -> tuple[Any, Any]:
    """The model and its tokenizer.

    Raises:
        InputError: this Transformers cannot read the folder.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"--model: Transformers {version('transformers')} cannot load {folder}: {error}; "
            "expected the folder or Hub id of the run's model, which for the packaged one "
            "oasis_hf.tools.packaged.smollm2() names"
        ) from error
    return model.to(device).eval(), tokenizer


def compressed(model: Any, ids: Any, presses: dict[str, Any]) -> dict[str, Any]:
    """For each of the presses of kvpress, a cache of what it keeps of `ids` `[1, tokens]`."""
    from kvpress import BasePress
    from transformers import DynamicCache

    caches = {name: DynamicCache() for name in presses}

    class SideBySide(BasePress):
        """Gives every press the same dense keys and values, and leaves the reading dense."""

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):  # type: ignore[no-untyped-def]
            for name, press in presses.items():
                kept = press.compress(module, hidden_states, keys, values, attentions, kwargs)
                caches[name].update(*kept, module.layer_idx)
            return keys, values

    for press in presses.values():
        press.post_init_from_model(model)
    with SideBySide()(model):
        model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
    return caches


def decode(model: Any, cache: Any, token: int, position: int, limit: int, ends: set[int]) -> Any:
    """Ids of a greedy answer that starts after `token`, which stands at `position`.

    The model's own `generate` would take the length of the cache for the number of tokens read.
    """
    import torch

    found: list[int] = []
    for step in range(limit):
        given, place = (torch.tensor([[n]], device=model.device) for n in (token, position + step))
        out = model(input_ids=given, position_ids=place, past_key_values=cache, use_cache=True)
        token = int(out.logits[0, -1].argmax())
        if token in ends:
            break
        found.append(token)
    return found


def answered(
    model: Any, tokenizer: Any, prompt: dict[str, Any], arms: dict[str, tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the answer of every method and number of tokens kept.

    Raises:
        InputError: a method keeps another number of tokens than it was asked for.
    """
    import kvpress
    import torch

    ids, started = prompt["ids"], time.perf_counter()
    length = len(ids) - 1
    presses = {
        arm: getattr(kvpress, PRESSES[name])(ratio(length, keep))
        for arm, (name, keep) in arms.items()
    }
    caches = compressed(model, torch.tensor([ids[:-1]], device=model.device), presses)
    reading = round(time.perf_counter() - started, 3)
    for arm, cache in caches.items():
        started, keep = time.perf_counter(), min(length, arms[arm][1])
        held = {layer.keys.shape[2] for layer in cache.layers}
        if held != {keep}:
            raise InputError(
                f"--presses: {arm} kept {sorted(held)} tokens, expected {keep}; omit it"
            )
        found = decode(model, cache, ids[-1], length, prompt["limit"], ends(model, tokenizer))
        steps = max(1, len(found))
        yield {name: prompt[name] for name in PROMPT} | {
            "arm": arm,
            "answers": [tokenizer.decode(found, skip_special_tokens=True).strip()],
            "ids": found,
            "answer_tokens": len(found),
            # Mean over steps, the step's own token included.
            "attended": keep + (steps + 1) / 2,
            "seconds": round(time.perf_counter() - started, 3),
            "reading": reading,
        }


def run(
    prompts: list[dict[str, Any]],
    folder: str,
    dtype: str,
    arms: dict[str, tuple[str, int]],
    out: Path,
) -> None:
    """Answers all prompts that the folder `out` has no answers to yet."""
    import torch

    try:
        import_module("kvpress")
    except ModuleNotFoundError as error:
        raise InputError(f"{error}; run: {INSTALL}") from error
    model, tokenizer = load(folder, dtype)
    out.mkdir(parents=True, exist_ok=True)
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": Path(str(model.config._name_or_path)).name,
        "dtype": dtype,
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("kvpress", "torch", "transformers")},
    }
    check_folder(out, about)
    write_json(out / ABOUT, about)
    log = out / ANSWERS
    known = set()
    if log.exists():
        known = {identity(record) for record in read_records(log)}
    for done, prompt in enumerate(prompts, 1):
        if all(identity(prompt | {"arm": arm}) in known for arm in arms):
            continue
        with torch.inference_mode():
            found = [
                r for r in answered(model, tokenizer, prompt, arms) if identity(r) not in known
            ]
        append_records(log, found)
        print(f"{done}/{len(prompts)} {prompt['task']} {prompt['context']:,}", flush=True)


def check_folder(out: Path, about: dict[str, Any]) -> None:
    """Raise `InputError` where a folder's answers are those of another model or dtype."""
    if not (out / ABOUT).exists():
        return
    found = read_json(out / ABOUT)
    for name in ("model", "dtype", "versions"):
        if found[name] != about[name]:
            raise InputError(
                f"--out: {out} holds answers with {name} {found[name]}, expected {about[name]}; "
                "name another folder"
            )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(COMMAND, description=str(__doc__).splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help="what --prompts wrote")
    parser.add_argument("--model", required=True, help="folder or Hub id of the run's model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--presses", default="snapkv,expected_attention,streaming_llm,knorm")
    parser.add_argument("--keep", default="512,2048", help="tokens kept per KV head")
    parser.add_argument("--out", type=Path, required=True, help="folder; completed if there")
    parser.add_argument("--threads", type=int, help="CPU threads")
    given = parser.parse_args()
    try:
        names, keeps = press_names(given.presses), budgets(given.keep)
        arms = {f"kvpress-{name}/{keep}": (name, keep) for name in names for keep in keeps}
        prompts = read_prompts(given.prompts)
        if given.threads:
            import torch

            torch.set_num_threads(given.threads)
        run(prompts, given.model, given.dtype, arms, given.out)
    except InputError as error:
        raise SystemExit(f"{COMMAND}: {error}") from None
