"""Texts of the figures: a Translation maps keys to the sentences of one language and fills in values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Translation:
    """words(key, **values) -> a sentence of one language. Unknown keys are returned unchanged, so that names pass through."""

    table: Mapping[str, str]

    def __call__(self, key: str, **values: object) -> str:
        return self.table.get(key, key).format(**values)


ENGLISH = Translation(
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
        "wavelength": "wavelength (tokens per rotation)",
        "encoding position": "{name}: the vector of each position",
        "encoding distance": "{name}: the table row of each distance",
        "dimensions": "{name}: single channels, from the first to the last",
        "similarity": "{name}: cosine similarity of two positions (1: same direction)",
        "kernel": "{name}, head {head}: {pattern}",
        "flat": "position adds nothing to any score",
        "stripes": "constant along each diagonal, so only j − i matters",
        "no stripes": "varies along diagonals, so absolute positions matter",
        "over distance": "{name}: contribution of position to the score; {pattern}",
        "heads agree": "the same for every head",
        "heads differ": "different for each head",
        "buckets": "{name}: table row of each distance; constant up to {low} and from {high}",
        "wavelengths": "{slow} of {pairs} pairs do not complete a rotation within the {original} trained tokens",
        "trained": "trained on {length} tokens",
        "target length": "target: {length} tokens",
        "total": "score = the sum of:",
        "absent": "{term} (absent)",
    }
)
