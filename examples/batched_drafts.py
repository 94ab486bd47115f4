"""Speculative decoding of a batch: every prompt accepts its own number of drafts.

`model.generate(assistant_model=...)` and `model.generate(prompt_lookup_num_tokens=...)` take one
prompt at a time. `oasis_hf.generation.generate` takes as many as you have, of any lengths:

    python examples/batched_drafts.py --model meta-llama/Llama-3.1-8B-Instruct \\
        --draft meta-llama/Llama-3.2-1B-Instruct

Without `--draft` the drafts are what followed the newest words where they stood before (prompt
lookup), which costs nothing. `--small` makes a quick run.
"""

import argparse
import time

from oasis_hf import OasisCache
from oasis_hf.facts.threads import bound_threads
from oasis_hf.generation import Speculation, generate
from oasis_hf.tools.needle import needle_prompt
from oasis_hf.tools.packaged import load, prose, smollm2

QUESTIONS = (("Vienna", 48153, 0.2), ("Lisbon", 73920, 0.5), ("Oslo", 26481, 0.8))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate for a batch of prompts with drafts.")
    parser.add_argument("--model", help="a Hub id or a folder; the packaged SmolLM2 by default")
    parser.add_argument("--draft", help="a smaller model of the same family")
    parser.add_argument("--budget", type=int, default=512, help="tokens attended to per step")
    parser.add_argument("--small", action="store_true", help="short texts, for a quick run")
    options = parser.parse_args(arguments)
    bound_threads()  # Leaves other processes their cores.

    # 1. A model, and a draft if there is one. Only the large one needs the attention "oasis".
    model, tokenizer = load(options.model or smollm2())
    draft = load(options.draft, attn_implementation="sdpa")[0] if options.draft else None

    # 2. Prompts of different lengths, padded on the left as for any batch.
    longest = 256 if options.small else 2048
    prompts = [
        needle_prompt(tokenizer, longest - 30 * row, depth, city, number, prose())[0].tolist()
        for row, (city, number, depth) in enumerate(QUESTIONS)
    ]
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    inputs = inputs.to(model.device)

    # 3. The same batch without drafts, with a fixed number of them, and with a policy that measures
    #    whether they pay and leaves them out where they do not.
    length = 4
    drafts = {"assistant_model": draft} if draft else {"prompt_lookup_num_tokens": length}
    ways = {
        "no drafts": {},
        "drafts": drafts | {"speculation": Speculation(length)},
        "drafts where they pay": drafts | {"speculation": Speculation(length, adaptive=True)},
    }
    for way, extra in ways.items():
        cache = OasisCache(model, budget=256 if options.small else options.budget)
        started = time.perf_counter()
        output = generate(
            model,
            **inputs,
            past_key_values=cache,
            max_new_tokens=24 if options.small else 48,
            do_sample=False,
            return_dict_in_generate=True,
            **extra,
        )
        seconds, did = time.perf_counter() - started, output.speculation
        print(f"{way}: {seconds:.1f} s, {did.rounds} steps of the model", end="")
        print(f", {did.accepted} of {did.drafted} drafts accepted" if did.drafted else "")
        answers = output.sequences[:, inputs["input_ids"].shape[1] :]
        for answer in tokenizer.batch_decode(answers, skip_special_tokens=True):
            print(f"  {answer.strip()}")


if __name__ == "__main__":
    main()
