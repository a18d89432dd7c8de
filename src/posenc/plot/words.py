"""The words on the pictures. A language is a table of the same keys; `Words` fills in the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Words:
    """words(key, **values): a sentence of one language. An unknown key is itself, so that names pass through."""

    table: Mapping[str, str]

    def __call__(self, key: str, **values: object) -> str:
        return self.table.get(key, key).format(**values)


ENGLISH = Words(
    {
        "position": "position (tokens)",
        "distance": "distance r = j − i (tokens; negative: past)",
        "dimension": "dimension",
        "cos, sin of pair": "channel (cosines of the pairs, then sines)",
        "head": "head",
        "all heads": "all heads",
        "pair": "pair of channels",
        "value": "value",
        "cosine": "cosine similarity",
        "score": "score (logits)",
        "row": "table row",
        "key j": "key position j (tokens)",
        "query i": "query position i (tokens)",
        "wavelength": "wavelength (tokens for one turn)",
        "encoding position": "{name}: the vector of each position",
        "encoding distance": "{name}: what each distance reads",
        "dimensions": "{name}: single channels, from the first to the last",
        "similarity": "{name}: how alike two places look (1: the same direction)",
        "kernel": "{name}, head {head}: {look}",
        "flat": "position adds nothing to any score",
        "stripes": "one value along each diagonal, only j − i counts",
        "no stripes": "values change along diagonals, the place itself counts",
        "over distance": "{name}: what position does to the score; {look}",
        "heads agree": "every head the same",
        "heads differ": "each head its own reach",
        "buckets": "{name}: distances share rows; constant up to {low} and from {high}",
        "wavelengths": "{slow} of {pairs} pairs make no full turn within the {original} trained tokens",
        "trained": "trained on {length} tokens",
        "wanted": "wanted: {length} tokens",
        "total": "score = the sum of:",
        "absent": "{term} (absent)",
    }
)
