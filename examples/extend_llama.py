"""Extend a Llama-like model's context with YaRN, save it, load it with transformers alone.

python examples/extend_llama.py                a tiny random model, 64 -> 256 tokens
python examples/extend_llama.py FOLDER --factor 4 --out FOLDER-4x
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from posenc import hf, scaling

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="a name or folder to load; without one, a tiny random model")
parser.add_argument("--factor", type=float, default=4.0)
parser.add_argument("--out", help="where to save; default: a temporary folder")
given = parser.parse_args()

torch.manual_seed(0)
if given.model:
    model = AutoModelForCausalLM.from_pretrained(given.model)
else:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=64)
    )  # fmt: skip
model.eval()

original = model.config.max_position_embeddings
hf.extend(model, scaling.YaRN(factor=given.factor, original=original))
print(f"{original} -> {model.config.max_position_embeddings} tokens: {model.config.rope_parameters}")

ids = torch.randint(2, model.config.vocab_size, (1, min(2 * original, 512)))
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(given.out or folder)
    loaded = AutoModelForCausalLM.from_pretrained(given.out or folder).eval()
    difference = (model(ids).logits - loaded(ids).logits).abs().max().item()
print(f"loaded by transformers alone: largest difference of the logits {difference:.1e}")
