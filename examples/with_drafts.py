"""Speculative decoding over a KV cache in host memory: a draft model, and prompt lookup.

Drafts make one step of the large model worth several tokens, and each step of an offloaded cache
has its fixed costs, so the two go well together. Nothing is set up for it: pass `assistant_model`
or `prompt_lookup_num_tokens` to `generate` as with any cache.

The right pair is a large model and a small one of the same family, for instance

    python examples/with_drafts.py --model meta-llama/Llama-3.1-8B-Instruct \\
        --draft meta-llama/Llama-3.2-1B-Instruct

Without `--draft` a second copy of the model drafts for the first. That shows the mechanics, since
nearly every draft is accepted, but saves no time: the draft costs as much as the model.
`--small` makes a quick run.
"""

import argparse
import time

from oasis_hf import OasisCache
from oasis_hf.facts.threads import bound_threads
from oasis_hf.tools.needle import needle_prompt
from oasis_hf.tools.packaged import load, prose, smollm2


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate with drafts and a cache in host memory.")
    parser.add_argument("--model", help="a Hub id or a folder; the packaged SmolLM2 by default")
    parser.add_argument("--draft", help="a smaller model of the same family")
    parser.add_argument("--budget", type=int, default=256, help="tokens attended to per step")
    parser.add_argument("--small", action="store_true", help="a short text, for a quick run")
    options = parser.parse_args(arguments)
    bound_threads()  # Leaves other processes their cores.

    # 1. Two models that share a tokenizer. Only the large one has the attention "oasis": a draft
    #    is small, and so is its KV.
    name = options.model or smollm2()
    model, tokenizer = load(name)
    draft, _ = load(options.draft or name, attn_implementation="sdpa")
    # How many tokens to draft is a setting of the draft. Without a threshold it always drafts that
    # many, also when it is unsure.
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.assistant_confidence_threshold = 0.0

    # 2. A prompt whose answer repeats words of the question, which prompt lookup can draft.
    context = 384 if options.small else 2048
    ids = needle_prompt(tokenizer, context, 0.5, "Vienna", 48153, prose()).to(model.device)

    # 3. The same request three ways, each with a fresh cache.
    ways = {
        "no drafts": {},
        "a draft model": {"assistant_model": draft},
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
    }
    for way, extra in ways.items():
        cache = OasisCache(model, budget=128 if options.small else options.budget)
        started = time.perf_counter()
        output = model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=24 if options.small else 32,
            do_sample=False,
            **extra,
        )
        seconds = time.perf_counter() - started
        stats = cache.stats()
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
        print(f"{way}: {answer}\n  {seconds:.1f} s, {stats.steps} steps of the large model", end="")
        # Each verified draft that is right is a step of the large model saved.
        print(f", {stats.accepted} of {stats.drafted} drafts accepted\n" if stats.rounds else "\n")


if __name__ == "__main__":
    main()
