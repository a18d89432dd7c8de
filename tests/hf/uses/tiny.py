"""A tiny random model of each family with a head, and inputs for it: what the tests of uses share."""

import copy

import torch
import transformers as hft

from posenc import hf
from posenc.hf import rules
from tests.seeds import generator, seed

DEBERTA = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, max_position_embeddings=128,
    relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False, position_buckets=8,
    max_relative_positions=20, share_att_key=True, norm_rel_ebd="layer_norm", type_vocab_size=0,
)  # fmt: skip
T5 = dict(
    d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
    relative_attention_max_distance=20, decoder_start_token_id=0,
)  # fmt: skip
LLAMA = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=37,
    max_position_embeddings=256,
)  # fmt: skip
MPNET = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, max_position_embeddings=128
)
FAMILIES = {
    "t5": (hft.T5ForConditionalGeneration, hft.T5Config, T5),
    "deberta": (hft.DebertaV2ForMaskedLM, hft.DebertaV2Config, DEBERTA),
    "mpnet": (hft.MPNetForMaskedLM, hft.MPNetConfig, MPNET),
    "bloom": (hft.BloomForCausalLM, hft.BloomConfig, dict(hidden_size=32, n_layer=2, n_head=4)),
    "mpt": (hft.MptForCausalLM, hft.MptConfig, dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=128)),
    "llama": (hft.LlamaForCausalLM, hft.LlamaConfig, LLAMA),
}
DECODERS = ("bloom", "mpt", "llama")
ENCODERS = ("deberta", "mpnet")
WORDS = 64


def make(family, base=1, **options):
    """A random model whose scores and biases matter; without dropout, unless options give it."""
    model, config, sizes = FAMILIES[family]
    made = config(vocab_size=WORDS, pad_token_id=0, bos_token_id=2, eos_token_id=1, **{**sizes, **options})
    if not options:
        for name in vars(made):
            if "dropout" in name and isinstance(getattr(made, name), float):
                setattr(made, name, 0.0)
    torch.manual_seed(seed(base))
    made = model(made).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    made.tie_weights()
    return made


def pair(family, **options):
    """The original, and the same accelerated."""
    original = make(family, **options)
    return original, hf.accelerate(copy.deepcopy(original))


def run_engines():
    """In a process without pytest: as the fixture of tests/hf/conftest.py."""
    for name in rules.NUMBERS:
        setattr(rules, name, {} if isinstance(getattr(rules, name), dict) else 0)


def batch(family, rows=3, length=17, padding=True, base=2):
    """Token ids, a mask with padding (the second row on the right, the third on the left), labels; a decoder's for T5."""
    numbers = generator(base)
    ids = torch.randint(3, WORDS, (rows, length), generator=numbers)
    mask = torch.ones(rows, length, dtype=torch.long)
    if padding:
        mask[1 % rows, length - length // 3 :] = 0
        mask[2 % rows, : length // 4] = 0
    given = {"input_ids": ids * mask, "attention_mask": mask}
    if family == "t5":
        given["labels"] = torch.randint(3, WORDS, (rows, 7), generator=numbers)
    else:
        given["labels"] = ids.masked_fill(mask == 0, -100)
        # nor the token that padding would predict: of a fully masked query the originals have gradients of scores that were
        # rounded away, or NaN
        given["labels"][:, 1:][mask[:, :-1] == 0] = -100
    return given


def inputs(family, **options):
    """A batch without labels; a decoder's tokens for T5."""
    given = batch(family, **options)
    labels = given.pop("labels")
    if family == "t5":
        given["decoder_input_ids"] = labels
    return given


def logits_at_tokens(family, model, given):
    """Logits, where a token is."""
    found = model(**given).logits
    return found if family == "t5" else found[given["attention_mask"].bool()]


def largest_difference(ours, theirs):
    """By name, relative to the largest number of each."""
    assert ours.keys() == theirs.keys()
    return max(
        (
            (ours[name].float() - theirs[name].float()).abs().max() / theirs[name].float().abs().max().clamp(min=1e-6)
        ).item()
        for name in theirs
    )
