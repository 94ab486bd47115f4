"""Words, names and values that generated tasks are made of."""

from __future__ import annotations

import string
import uuid
from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    "amber ancient autumn azure bitter blazing bold brave bright brisk broad bronze calm careful "
    "charming cheerful clever cloudy cobalt cold copper coral cosmic crimson curious damp daring "
    "deep delicate distant dusty eager early earnest eastern elegant emerald endless faint fair "
    "famous fearless fierce foggy fragile frosty gentle gilded glad golden graceful grand gray "
    "green happy hasty hidden hollow honest humble icy idle indigo ivory jolly keen kind lively "
    "lonely loud lucky lunar mellow mighty misty modest mossy narrow noble northern odd olive "
    "orange patient plain polite proud purple quick quiet rapid rare restless rough royal rustic "
    "rusty sacred sandy scarlet secret serene shady sharp shiny silent silver simple sleepy slim "
    "smooth snowy solar solemn southern spare stable steady stern stormy strange subtle sunny "
    "swift tall tame tender thirsty timid tiny tranquil twin vast velvet violet vivid wandering "
    "warm wary western wild windy wise witty wooden young zealous"
)
NOUNS = _words(
    "acorn anchor anvil apple apron arrow badge bagel balloon banjo barrel basin basket beacon "
    "bench bicycle blanket bonnet bottle boulder bracelet bridge broom brush bucket buckle bugle "
    "button cabin cactus candle canoe canvas carpet castle cello chair chalk chimney chisel "
    "clock cloak compass cottage cradle crayon crown cup curtain cushion dagger desk dial doll "
    "drum easel engine falcon feather fence ferry fiddle flag flask flute fountain garden garnet "
    "gate glove goblet guitar hammer hammock harbor harp hatchet helmet hinge hourglass inkwell "
    "island jacket jar jewel kettle kite ladder ladle lamp lantern latch ledger lens lever "
    "locket loom magnet mantle map marble mask meadow medal mill mirror mitten mug needle "
    "notebook oar orchard organ paddle paint parcel parlor pebble pencil pendant piano pillow "
    "pipe pitcher plate plough pocket pulley puppet quill quilt rafter ribbon rope saddle sail "
    "scale scarf scissors scroll shelf shield shovel sickle sled slipper spade spindle sponge "
    "spoon spur stamp statue stool stove string sundial tablet table tapestry teapot tent "
    "thimble thread ticket torch tower trumpet trunk tunnel umbrella valley vase violin wagon "
    "wallet whistle willow window yarn zipper"
)
CITIES = _words(
    "Amsterdam Athens Barcelona Beijing Berlin Boston Brussels Budapest Cairo Chicago Copenhagen "
    "Delhi Denver Dublin Geneva Hamburg Helsinki Istanbul Jakarta Lisbon London Madrid Melbourne "
    "Milan Montreal Moscow Mumbai Munich Oslo Paris Prague Rome Seattle Seoul Singapore Stockholm "
    "Sydney Tokyo Toronto Venice Vienna Warsaw"
)
FIRST_NAMES = _words(
    "Ada Boris Clara Daniel Elena Felix Greta Hugo Irene Jonas Karin Leon Maria Nora Oscar Paula "
    "Quentin Rosa Simon Tilda Ulrich Vera Walter Xenia Yusuf Zelda"
)
LAST_NAMES = _words(
    "Abbott Bauer Calder Dupont Ellison Fontaine Garrick Hansen Ivanov Jensen Keller Lindqvist "
    "Moreno Novak Okafor Petrov Quimby Rossi Santos Tanaka Ueda Varga Weber Xu Yilmaz Zimmer"
)


def keys(draw: Random, count: int) -> list[str]:
    """Distinct adjective-noun pairs, such as "brisk-lantern".

    Raises:
        ValueError: more are wanted than there are pairs.
    """
    pairs = len(ADJECTIVES) * len(NOUNS)
    if count > pairs:
        raise ValueError(f"keys: got {count}, but only {pairs} adjective-noun pairs exist")
    chosen = draw.sample(range(pairs), count)
    return [f"{ADJECTIVES[n // len(NOUNS)]}-{NOUNS[n % len(NOUNS)]}" for n in chosen]


def numbers(draw: Random, count: int, digits: int = 7) -> list[str]:
    """Distinct numbers with exactly this many digits."""
    return [str(n) for n in draw.sample(range(10 ** (digits - 1), 10**digits), count)]


def uuids(draw: Random, count: int) -> list[str]:
    """Random identifiers of version 4."""
    return [str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(count)]


def names(draw: Random, count: int) -> list[str]:
    """Distinct people."""
    pairs = draw.sample(range(len(FIRST_NAMES) * len(LAST_NAMES)), count)
    return [
        f"{FIRST_NAMES[n % len(FIRST_NAMES)]} {LAST_NAMES[n // len(FIRST_NAMES)]}" for n in pairs
    ]


def made_up(
    draw: Random, count: int, length: int, letters: str = string.ascii_lowercase
) -> list[str]:
    """Distinct strings of random letters.

    Raises:
        ValueError: more are wanted than half of those that exist; the last ones would take long.
    """
    most = len(set(letters)) ** length // 2
    if count > most:
        raise ValueError(f"made_up: got {count}, expected at most {most} of {length} letters")
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices(letters, k=length))] = None
    return list(found)
