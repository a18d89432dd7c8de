"""Defaults that transformers 5.22 defines in the code of a model type and not in its configuration (model_defaults.toml)."""

import tomllib
from pathlib import Path

_READ = tomllib.loads(Path(__file__).with_name("model_defaults.toml").read_text(encoding="utf-8"))
INTERLEAVED = frozenset(_READ["interleaved"])
"""Model types whose code rotates neighbouring channels; all others rotate halves."""
BASES: dict[str, float] = _READ["bases"]
"""The base where a file does not give one, for the types where that is not 10000."""
LAYERED: dict[str, dict[str, float]] = _READ["layered"]
"""Bases of the two types of layers, where a file gives none or one rotation only."""
BY_LAYER = frozenset(_READ["by_layer"])
"""Types with a rotation for each type of layer that only a new file, or their class, defines."""
OTHERS = frozenset(_READ["others"])
"""Types whose configuration has rope_parameters, and that are in no table above."""
KEYLESS = INTERLEAVED | set(BASES) | set(LAYERED) | BY_LAYER | OTHERS
"""Types that rotate even where their configuration has no key for it, such as the first ones of Llama and Falcon."""
