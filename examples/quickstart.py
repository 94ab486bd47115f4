"""Quickstart: from plain `generate` to a KV cache in host memory.

What changes in a program that generates with Transformers:

    + from oasis_hf import OasisCache

      model = AutoModelForCausalLM.from_pretrained(
          name,
    +     attn_implementation="oasis",
      )
    + cache = OasisCache(model, budget=2048)
      output = model.generate(
          **inputs,
    +     past_key_values=cache,
      )

Since Transformers 5.24 the last argument is called `cache`; the older name still works, with a
warning.

Run it with `python examples/quickstart.py`, on any model of the Hub with `--model`, or with
`--small` for a run of a few seconds.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from oasis_hf import OasisCache
from oasis_hf.facts.threads import bound_threads
from oasis_hf.tools.packaged import fast_cpu_dtype, prose, smollm2


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate with a KV cache in host memory.")
    parser.add_argument("--model", help="a Hub id or a folder; the packaged SmolLM2 by default")
    parser.add_argument("--small", action="store_true", help="a short text, for a quick run")
    options = parser.parse_args(arguments)
    bound_threads()  # Leaves other processes their cores.

    # 1. Load the model as always, with the attention "oasis". Importing `oasis_hf` made that name
    #    known. Without an OasisCache the model behaves exactly as with "sdpa".
    name = options.model or smollm2()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(
        name,
        dtype="auto" if options.model else fast_cpu_dtype(),
        device_map="auto",
        attn_implementation="oasis",
    )

    # 2. Any inputs will do. These are a text of some length and a request.
    text = prose()[: 2_000 if options.small else 12_000]
    messages = [{"role": "user", "content": f"{text}\n\nSum up the text above in one sentence."}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)

    # 3. The cache. `budget` is how many tokens each KV head attends to in a step. All keys and
    #    values stay in host memory, and the ones that matter now are in the working set.
    cache = OasisCache(model, budget=128 if options.small else 512)
    output = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=16 if options.small else 64,
        do_sample=False,
    )

    prompt_tokens = inputs["input_ids"].shape[1]
    print(tokenizer.decode(output[0, prompt_tokens:], skip_special_tokens=True))

    # 4. The stats say how often a block that was wanted was in the working set, and what the
    #    working set takes, compared with a full KV cache.
    print()
    print(cache.stats())


if __name__ == "__main__":
    main()
