"""Draws the pictures of *How it works*, each in a light and a dark variant.

    python docs/tools/pictures.py            # writes docs/pictures/*.svg

A test compares the files with what this script draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from drawing import PALETTES, Drawing

FOLDER = Path(__file__).parent.parent / "pictures"


def life(palette: str) -> Drawing:
    """Where a token is, from its arrival on."""
    d = Drawing(960, 548, palette, "Where the keys and values of one token are during its life")
    d.box(10, 10, 940, 318, "band-gpu", 10)
    d.text(26, 36, "GPU memory", bold=True, colour="gpu-line")
    d.box(10, 404, 940, 134, "band-host", 10)
    d.text(26, 428, "Host memory", bold=True, colour="host-line")

    d.box(60, 106, 190, 150, "tail")
    d.text(76, 130, "Tail", 15, True)
    d.lines(
        76, 154, ["a ring of the newest", "tokens and of drafts,", "attended to by every", "step"]
    )
    d.box(430, 56, 220, 92, "index")
    d.text(446, 80, "Index", 15, True)
    d.lines(446, 104, ["every key at 3 bits: ranks", "all blocks without them"])
    d.box(430, 206, 220, 92, "gpu")
    d.text(446, 230, "Pool", 15, True)
    d.lines(446, 254, ["slots that hold the", "resident blocks"])
    d.box(756, 150, 150, 92, "step")
    d.text(772, 174, "Attention", 15, True)
    d.lines(772, 198, ["over the tail and", "the chosen blocks"])
    d.box(60, 442, 590, 80, "host")
    d.text(76, 466, "Store", 15, True)
    d.lines(
        76, 490, ["every verified token's K and V, block by block,", "as long as the cache lives"]
    )

    d.arrow([(155, 56), (155, 104)])
    d.number(155, 68, 1)
    d.text(174, 73, "K and V of a new token")
    d.arrow([(100, 256), (100, 306)], dashed=True)
    d.number(100, 282, 2)
    d.text(118, 310, "rejected draft", colour="muted")
    # One group leaves the tail: to the index, the pool and the store.
    d.arrow([(250, 181), (360, 181)], "tail-line", head=False)
    d.arrow([(360, 181), (360, 102), (428, 102)], "tail-line")
    d.arrow([(360, 181), (360, 252), (428, 252)], "tail-line")
    d.arrow([(300, 181), (300, 440)], "tail-line")
    d.number(300, 181, 3)
    d.lines(264, 140, ["group is full", "and verified"], colour="muted", size=12.5, step=15)
    # The pool and back.
    d.arrow([(580, 298), (580, 370)], dashed=True)
    d.number(580, 322, 4)
    d.text(598, 372, "slot is reused, nothing is written back", colour="muted")
    d.arrow([(500, 442), (500, 300)], "host-line")
    d.number(500, 390, 5)
    d.text(482, 372, "wanted again: fetched", colour="muted", anchor="end")
    # What a step reads.
    d.arrow([(650, 252), (704, 252), (704, 214), (754, 214)], "gpu-line")
    d.arrow([(650, 102), (704, 102), (704, 178), (754, 178)], "index-line")
    d.text(714, 134, "which blocks", colour="muted")
    d.number(831, 132, 6)
    return d


def step(palette: str) -> Drawing:
    """One decode step over two streams."""
    d = Drawing(1000, 300, palette, "One decode step on a time line of two CUDA streams")
    d.text(14, 62, "compute", bold=True)
    d.text(14, 79, "stream", bold=True)
    d.text(14, 222, "side", bold=True)
    d.text(14, 239, "stream", bold=True)
    start, top, height = 84, 40, 62
    d.text(start, 26, "layer 1", colour="muted")
    d.arrow([(start, 112), (start, 120), (552, 120), (552, 112)], head=False)
    x: float = start
    places: dict[str, tuple[float, float]] = {}
    parts = [
        ("q, k, v", "step", 62),
        ("append", "tail", 66),
        ("score", "index", 58),
        ("plan", "index", 54),
        ("fetch", "host", 58),
        ("attend", "gpu", 68),
        ("MLP", "step", 102),
    ]
    for name, kind, width in parts:
        d.box(x, top, width - 4, height, kind, 4)
        d.text(x + (width - 4) / 2, top + 36, name, 12.5, anchor="middle")
        places[name] = (x, x + width - 4)
        x += width
    for name, width in (("layer 2", 104), ("…", 46), ("layer L", 104)):
        d.box(x, top, width - 4, height, "step", 4)
        d.text(x + (width - 4) / 2, top + 36, name, 12.5, anchor="middle")
        places[name] = (x, x + width - 4)
        x += width
    d.text(places["layer 2"][0], 26, "the same in every layer", colour="muted")
    end = x + 6
    d.arrow([(end, 14), (end, 290)], dashed=True, head=False)
    d.text(end + 8, 26, "step n + 1", colour="muted")
    d.box(end + 10, top, 58, height, "step", 4)
    d.text(end + 39, top + 36, "q, k, v", 12.5, anchor="middle")
    d.box(end + 72, top, 62, height, "tail", 4)
    d.text(end + 103, top + 36, "append", 12.5, anchor="middle")

    lane = 198
    after = places["attend"][1]
    transfers = [
        ("layer 1", after + 8, 92),
        ("layer 2", places["layer 2"][0] + 66, 78),
        ("layer L", places["layer L"][0] + 44, 58),
    ]
    for name, left, width in transfers:
        d.box(left, lane, width, 52, "host", 4)
        d.text(left + width / 2, lane + 30, name, 12.5, anchor="middle")
    d.text(transfers[1][1] + 86, lane + 30, "…", 12.5)
    d.arrow([(after - 20, top + height), (after - 20, lane + 16), (after + 6, lane + 16)], "line")
    d.number(after - 20, 150, 1)
    left, width = transfers[0][1], transfers[0][2]
    d.arrow(
        [(left + width / 2, lane + 52), (left + width / 2, 276), (end + 103, 276), (end + 103, 104)]
    )
    d.number(end - 120, 276, 2)
    d.lines(
        start,
        170,
        ["fetch: blocks that this step", "needs and has not resident"],
        colour="muted",
        size=12.5,
    )
    middle = places["fetch"][0] + 27
    d.arrow([(252, 165), (middle, 165), (middle, 104)], "host-line")
    d.lines(
        start,
        lane + 20,
        ["fetches for the next step,", "while later layers compute"],
        colour="muted",
        size=12.5,
    )
    return d


LAYERS, KV_HEADS, HEAD_DIM, TOKENS, BUDGET, HEAD_ROOM = 32, 8, 128, 131_072, 2_048, 2
WEIGHTS = 8_030_261_248 * 2
"""Bytes of Llama-3.1-8B in bfloat16."""
FULL_KV = TOKENS * LAYERS * KV_HEADS * HEAD_DIM * 2 * 2
INDEX = TOKENS * LAYERS * KV_HEADS * HEAD_DIM * 3 / 8
POOL = FULL_KV * HEAD_ROOM * BUDGET / TOKENS
# Ring of 96 places: 32 recent tokens, an unfinished group of 31, 32 rows, in whole groups of 32.
TAIL = FULL_KV * 96 / TOKENS


def places(palette: str) -> Drawing:
    """What is in which memory, to scale."""
    d = Drawing(960, 470, palette, "What is on the GPU and what in host memory, to scale")
    scale = 24 / 1e9
    d.box(10, 10, 940, 268, "band-gpu", 10)
    d.text(26, 36, "GPU memory", bold=True, colour="gpu-line")
    bars = [
        ("weights", WEIGHTS, "step", "16.1 GB"),
        ("index", INDEX, "index", "every key at 3 bits: {} GB"),
        ("pool", POOL, "gpu", "4,096 tokens per KV head, half of them attended to: {} GB"),
        ("tail", TAIL, "tail", "the newest tokens: {} GB"),
    ]
    y = 54.0
    for name, size, kind, words in bars:
        width = max(size * scale, 2)
        d.box(150, y, width, 36, kind, 2)
        d.text(136, y + 23, name, anchor="end", bold=True)
        label = words.format(f"{size / 1e9:.2f}")
        d.text(150 + width + 12, y + 23, label)
        y += 46
    d.text(150, y + 18, "and tables: which block is in which slot, lengths, the plan of the step")
    d.box(10, 374, 940, 86, "band-host", 10)
    d.text(26, 400, "Host memory", bold=True, colour="host-line")
    width = FULL_KV * scale
    d.box(150, 408, width, 36, "host", 2)
    d.text(136, 431, "store", anchor="end", bold=True)
    d.text(150 + width + 12, 431, f"every token's K and V: {FULL_KV / 1e9:.1f} GB")
    d.arrow([(190, 376), (190, 280)], "host-line")
    d.lines(
        206,
        310,
        ["a step: a kernel reads the missing", "blocks straight from host memory"],
        size=12.5,
    )
    d.arrow([(470, 280), (470, 372)], "tail-line")
    d.lines(
        486,
        310,
        ["a step: full groups of", "the tail are written out"],
        size=12.5,
    )
    d.arrow([(680, 280), (680, 372)], "line")
    d.arrow([(694, 372), (694, 282)], "line")
    d.lines(
        710,
        310,
        ["a prompt: copied out and read back", "layer by layer, by the copy engines"],
        size=12.5,
    )
    return d


PICTURES: dict[str, Callable[[str], Drawing]] = {"life": life, "step": step, "places": places}


def drawn() -> Iterator[tuple[Path, str]]:
    """Every file and its contents."""
    for name, draw in PICTURES.items():
        for palette in PALETTES:
            yield FOLDER / f"{name}-{palette}.svg", draw(palette).svg()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in drawn():
        path.write_text(text, encoding="utf-8")
        print(path)
