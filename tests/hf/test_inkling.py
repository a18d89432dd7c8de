"""Inkling's text model against transformers: full and sliding layers, temperature, padding, caches."""

import torch
from transformers import StaticCache
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingTextModel

from posenc import hf
from posenc.hf import rules
from tests.hf.compare import outputs_agree
from tests.seeds import seed

SIZES = dict(
    vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
    sliding_window_size=7, rel_extent=11, d_rel=4, log_scaling_n_floor=5, local_layer_ids=[1],
    mlp_layer_types=["dense", "dense"], pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip


def make(model=InklingTextModel):
    torch.manual_seed(seed(1))
    made = model(InklingTextConfig(**SIZES, attn_implementation="eager")).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def batch():
    torch.manual_seed(seed(2))
    ids = torch.randint(3, 99, (3, 29))
    mask = torch.ones(3, 29, dtype=torch.long)
    mask[1, 20:] = 0
    mask[2, :6] = 0
    return ids, mask


def test_output_attentions_falls_back():
    ids, mask = batch()
    model = make()
    theirs = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    ours = hf.accelerate(model)(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    for a, b in zip(ours, theirs, strict=True):
        outputs_agree(a[mask.bool().all(1)], b[mask.bool().all(1)])


def test_the_start_of_a_text_in_a_static_cache():
    """Its states become a dense bias of the tokens so far, not of all slots."""
    (ids, _), model = batch(), make()
    cache = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad(), rules.suspended():
        theirs = model(ids, use_cache=False)[0]
        hf.accelerate(model)
        outputs_agree(model(ids, past_key_values=cache)[0], theirs)
