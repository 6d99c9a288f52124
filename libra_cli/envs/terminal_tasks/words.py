"""Words that tasks are made of."""

from __future__ import annotations

from random import Random

NOUNS = [
    "anchor",
    "bottle",
    "candle",
    "desk",
    "engine",
    "forest",
    "garden",
    "harvest",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "mirror",
    "needle",
    "orchard",
    "pencil",
    "quilt",
    "river",
    "saddle",
    "table",
    "umbrella",
    "valley",
    "window",
    "yard",
    "zebra",
]
NAMES = [
    "ada",
    "boris",
    "chen",
    "dora",
    "emil",
    "farah",
    "goran",
    "hana",
    "ivan",
    "jana",
    "karim",
    "lena",
    "marco",
    "nadia",
    "olaf",
]
CITIES = [
    "Lisbon",
    "Oslo",
    "Quito",
    "Nairobi",
    "Hanoi",
    "Lima",
    "Accra",
    "Tampere",
    "Porto",
    "Bergen",
]
_VERBS = ["carries", "follows", "leaves", "paints", "finds", "repairs", "watches", "counts"]


def sentence(rng: Random) -> str:
    """Return a line of a few words, which two calls hardly ever share."""
    one, other = rng.sample(NOUNS, 2)
    return f"The {one} {rng.choice(_VERBS)} the {other}, number {rng.randrange(10**6)}.\n"
