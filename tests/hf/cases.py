"""Every family once: name -> a function that makes (model, (inputs, padding))."""

import torch

from tests.hf import (
    test_alibi,
    test_conformer,
    test_deberta,
    test_inkling,
    test_longt5,
    test_mpnet,
    test_t5,
    test_xlnet,
)
from tests.seeds import seed


def pair(ids, mask, **more):
    return dict(input_ids=ids, attention_mask=mask, **more), mask


def with_decoder(ids, mask):
    return dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :11]), None


def speech(name):
    attn = "eager" if name in ("conformer", "bert relative_key") else "sdpa"
    torch.manual_seed(seed(2))
    mask = torch.ones(3, 37, dtype=torch.bool)
    mask[1, 20:] = False
    mask[2, :9] = False
    return lambda: (test_conformer.make(name, attn), (dict(x=torch.randn(3, 37, 32), attention_mask=mask), mask))


def xlnet(segmented):
    ids, mask, segments = test_xlnet.batch()
    return test_xlnet.make(), pair(ids, mask, **({"token_type_ids": segments} if segmented else {}))


CASES = {
    **{f: lambda f=f: (test_t5.make(f), with_decoder(*test_t5.batch())) for f in test_t5.FAMILIES},
    "longt5 local": lambda: (test_longt5.make("local"), with_decoder(*test_longt5.batch())),
    "longt5 global": lambda: (test_longt5.make("transient-global"), with_decoder(*test_longt5.batch())),
    "mpnet": lambda: (test_mpnet.make(), pair(*test_t5.batch())),
    **{
        f"deberta {f}": lambda f=f: (test_deberta.make(f), pair(*test_deberta.batch()))
        for f in ("v1", "v2", "v2 p2c", "v3")
    },
    "xlnet": lambda: xlnet(False),
    "xlnet segments": lambda: xlnet(True),
    **{f"speech {name}": speech(name) for name in test_conformer.MODELS},
    **{f: lambda f=f: (test_alibi.make(f), pair(*test_alibi.batch())) for f in test_alibi.MODELS},
    "inkling": lambda: (test_inkling.make(), pair(*test_inkling.batch())),
}
