"""Several questions about one long document, which is read only once.

The document's keys and values stay in the cache, in host memory. Each further question only costs
its own tokens: it is appended to the conversation, and `generate` continues from what the cache
holds. A fact that no earlier question needed is still found, since nothing is ever dropped.

Run it with `python examples/long_document_qa.py`, about your own text with `--document FILE
--question "…"`, on any model of the Hub with `--model`, or with `--small` for a quick run.
"""

import argparse
import time
from pathlib import Path

import torch

from oasis_hf import OasisCache
from oasis_hf.needle import Needle
from oasis_hf.packaged import load, prose, smollm2
from oasis_hf.threads import bound_threads

FACTS = [Needle("Vienna", 48153, depth=0.3), Needle("Oslo", 73920, depth=0.7)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Ask several questions about one document.")
    parser.add_argument("--model", help="a Hub id or a folder; the packaged SmolLM2 by default")
    parser.add_argument("--document", type=Path, help="a text file")
    parser.add_argument("--question", action="append", help="may be given several times")
    parser.add_argument("--budget", type=int, default=256, help="tokens attended to per step")
    parser.add_argument("--small", action="store_true", help="a short text, for a quick run")
    options = parser.parse_args(arguments)
    bound_threads()  # Leaves other processes their cores.
    if options.document and not options.question:
        parser.error("--document needs at least one --question")

    # 1. The document: yours, or pages of English prose with two facts hidden in them.
    if options.document:
        document, questions = options.document.read_text(), options.question
    else:
        document = prose()[: 2_000 if options.small else 12_000]
        for fact in FACTS:
            document = fact.hide_in(document)
        questions = options.question or [fact.question for fact in FACTS]

    # 2. The model, and one cache for the whole conversation.
    model, tokenizer = load(options.model or smollm2())
    cache = OasisCache(model, budget=128 if options.small else options.budget)

    # 3. The conversation. Each turn gives `generate` all of it so far, and what the cache holds
    #    already is not read again. The answer as the template writes it may differ from the tokens
    #    that were generated, at its end for one: the cache is cropped to what both have in common.
    messages: list[dict[str, str]] = []
    held = torch.empty(0, dtype=torch.long)
    for question in questions:
        content = question if messages else f"{document}\n\n{question}"
        messages.append({"role": "user", "content": content})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = inputs["input_ids"][0]
        shared = common_prefix(held, ids)
        cache.crop(shared - cache.get_seq_length())

        started = time.perf_counter()
        output = model.generate(
            **inputs.to(model.device),
            past_key_values=cache,
            max_new_tokens=24 if options.small else 32,
            do_sample=False,
        )
        seconds = time.perf_counter() - started
        answer = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()
        messages.append({"role": "assistant", "content": answer})
        # The newest token was sampled, but has not been through the model yet.
        held = output[0, :-1].cpu()
        print(f"{question}\n  {answer}\n  read {len(ids) - shared:,} tokens, {seconds:.1f} s\n")

    print(cache.stats())


def common_prefix(first: torch.Tensor, second: torch.Tensor) -> int:
    """Returns how many tokens at the start of two sequences of ids are the same."""
    length = min(len(first), len(second))
    differs = (first[:length] != second[:length]).nonzero()
    return int(differs[0]) if len(differs) else length


if __name__ == "__main__":
    main()
