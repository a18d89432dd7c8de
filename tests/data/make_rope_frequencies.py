"""Writes rope_frequencies.json from transformers' own functions: run it when a configuration is added.

python tests/data/make_rope_frequencies.py
"""

import json
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, modeling_rope_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PAIRS = 32
LISTS = {
    "short_factor": [1.0 + 0.02 * c for c in range(PAIRS)],
    "long_factor": [1.0 + 0.06 * c * c for c in range(PAIRS)],
}
CASES = [
    ({"rope_type": "linear", "factor": 4.0}, 1e4, 2048, [None]),
    ({"rope_type": "dynamic", "factor": 2.0}, 1e4, 2048, [None, 2048, 4096, 131072]),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 1e6, 131072, [None]),
    ({"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
      "beta_slow": 1.0, "truncate": False}, 150000.0, 131072, [None]),
    ({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
      "mscale_all_dim": 1.0}, 1e4, 163840, [None]),
    ({"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
     1e4, 65536, [None]),
    ({"rope_type": "longrope", "original_max_position_embeddings": 4096, **LISTS}, 1e4, 131072, [4096, 4097]),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192}, 5e5, 131072, [None]),
    ({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192}, 5e5, 131072, [None]),
    ({"rope_type": "proportional", "partial_rotary_factor": 0.25}, 1e6, 131072, [None]),
]  # fmt: skip


class Wide:
    """torch, with float64 for float: transformers' formulas without float32's rounding."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def main():
    modeling_rope_utils.torch = Wide()
    torch.Tensor.float = torch.Tensor.double
    entries = []
    for recipe, theta, longest, totals in CASES:
        config = {
            "head_dim": 2 * PAIRS,
            "max_position_embeddings": longest,
            "rope_parameters": {"rope_theta": theta, **recipe},
        }
        for total in totals:
            theirs = LlamaConfig(hidden_size=2 * PAIRS, num_attention_heads=1, **json.loads(json.dumps(config)))
            inverse, factor = ROPE_INIT_FUNCTIONS[recipe["rope_type"]](theirs, "cpu", seq_len=total)
            entries.append(
                {"config": config, "total": total, "attention_factor": factor, "frequencies": inverse.tolist()}
            )
    stored = {"made_by": f"transformers {transformers.__version__}, its own formulas in float64", "entries": entries}
    Path(__file__).with_name("rope_frequencies.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
