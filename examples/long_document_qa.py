"""Several questions about one long document, which is read only once.

The document's keys and values stay in the cache, in host memory. Each further question only costs
its own tokens: `Conversation` keeps the messages and the cache, and `generate` continues from what
the cache holds. A fact that no earlier question needed is still found, since nothing is ever
dropped.

Run it with `python examples/long_document_qa.py`, about your own text with `--document FILE
--question "…"`, on any model of the Hub with `--model`, or with `--small` for a quick run.
"""

import argparse
import time
from pathlib import Path

from transformers import TextStreamer

from oasis_hf import Conversation
from oasis_hf.facts.threads import bound_threads
from oasis_hf.tools.needle import Needle
from oasis_hf.tools.packaged import load, prose, smollm2

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

    # 2. The model, and a conversation with it, which has one cache for all turns. What the document
    #    says comes with the first question; `system=document` would do for models whose template
    #    has a system role.
    model, tokenizer = load(options.model or smollm2())
    conversation = Conversation(model, tokenizer, budget=128 if options.small else options.budget)

    # 3. The questions. The answers are printed as they come. Each turn gives `generate` the whole
    #    text so far, and what the cache holds of it is not read again.
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    for question in questions:
        print(question)
        started = time.perf_counter()
        conversation.reply(
            question if conversation.messages else f"{document}\n\n{question}",
            streamer=streamer,
            max_new_tokens=24 if options.small else 32,
            do_sample=False,
        )
        seconds = time.perf_counter() - started
        print(f"  read {conversation.tokens_read:,} tokens, {seconds:.1f} s\n")

    print(conversation.cache.stats())


if __name__ == "__main__":
    main()
