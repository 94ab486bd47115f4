"""Write an index of your own: which blocks deserve to be read, judged without reading them.

An index keeps a small summary of every block of keys in fast memory. For each step it turns queries
into one score per block, and the cache attends to the best. Two methods are all it takes:

- `encode` summarises full groups of keys, `[batch, heads, groups, tokens, dim]`;
- `block_logits` scores every block for every query row, `[batch, heads, rows, blocks]`.

Storage, growth, masking, the GQA group, beams, crops, saving and loading come with the base class.

The index below keeps a block's mean key and how far its keys spread around it: a query could meet a
key somewhat better than the mean. It takes the bytes of min/max; compare what each finds, and see
`make needles` for a real comparison. Run it with `python examples/write_an_index.py`; `--model`
takes any Hub id, `--small` makes a quick run.
"""

import argparse

import torch
from torch import Tensor

from oasis_hf import Index, OasisCache
from oasis_hf.facts.compat import cache_kwarg
from oasis_hf.facts.threads import bound_threads
from oasis_hf.tools.needle import needle_prompt
from oasis_hf.tools.packaged import load, prose, smollm2


class MeanSpreadIndex(Index):
    """The mean key of a block, and one standard deviation in the query's favour."""

    name = "mean-spread"

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        wide = keys.float()
        return {
            "mean": wide.mean(-2).to(keys.dtype),
            "spread": wide.std(-2, unbiased=False).to(keys.dtype),
        }

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        # The last entry of every array is a spare one: it takes masked-out writes.
        mean, spread = (self.arrays[name][:, :, :-1].float() for name in ("mean", "spread"))
        return query @ mean.transpose(-1, -2) + query.abs() @ spread.transpose(-1, -2)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare an index of your own with the others.")
    parser.add_argument("--model", help="a Hub id or a folder; the packaged SmolLM2 by default")
    parser.add_argument("--budget", type=int, default=256, help="tokens attended to per step")
    parser.add_argument("--small", action="store_true", help="a short text, for a quick run")
    options = parser.parse_args(arguments)
    bound_threads()  # Leaves other processes their cores.
    model, tokenizer = load(options.model or smollm2())
    tokens = 700 if options.small else 3000
    ids = needle_prompt(tokenizer, tokens, 0.4, "Vienna", 48153, prose()).to(model.device)

    # Read the prompt once, all but its last token; every index then continues its own copy.
    read = OasisCache(model, budget=options.budget)
    with torch.inference_mode():
        model(input_ids=ids[:, :-1], logits_to_keep=1, **{cache_kwarg(model): read})

    print(f"hidden in {ids.shape[1]} tokens: 48153")
    for index in (MeanSpreadIndex, "minmax", "keys2bit"):
        cache = read.fork(index=index)
        output = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        name = index if isinstance(index, str) else index.name
        print(f"{name:<12} {cache.stats().index_bytes / 1e3:7.0f} kB  {answer.strip()}")


if __name__ == "__main__":
    main()
