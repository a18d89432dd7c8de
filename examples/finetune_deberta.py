"""Fine-tune a DeBERTa on inputs longer than it was made for: the dense scores are gone, so memory is linear.

python examples/finetune_deberta.py            a tiny random model learns to find a marked token
python examples/finetune_deberta.py microsoft/deberta-v3-base --length 4096 --steps 100
"""

import argparse

import torch
from transformers import DebertaV2Config, DebertaV2ForTokenClassification

from posenc import hf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="a name or folder to load; without one, a tiny random model")
parser.add_argument("--length", type=int, default=192)
parser.add_argument("--steps", type=int, default=40)
given = parser.parse_args()

torch.manual_seed(0)
if given.model:
    model = DebertaV2ForTokenClassification.from_pretrained(given.model, num_labels=2)
else:
    model = DebertaV2ForTokenClassification(
        DebertaV2Config(
            vocab_size=50, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
            max_position_embeddings=64, relative_attention=True, position_buckets=16, norm_rel_ebd="layer_norm",
            share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False, num_labels=2,
        )
    )  # fmt: skip

hf.accelerate(model)
print(hf.report(model))
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.train()
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-5 if given.model else 3e-3)


def batch():
    """Label 1 for tokens that follow token 7; rows of different lengths."""
    ids = torch.randint(5, 50, (4, given.length))
    ids[torch.rand(ids.shape) < 0.2] = 7
    labels = torch.zeros_like(ids)
    labels[:, 1:] = (ids[:, :-1] == 7).long()
    mask = torch.ones_like(ids)
    mask[1:, given.length * 3 // 4 :] = 0
    return dict(input_ids=ids, attention_mask=mask, labels=labels.masked_fill(mask == 0, -100))


for step in range(given.steps):
    loss = model(**batch()).loss
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 10 == 0 or step == given.steps - 1:
        print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)
