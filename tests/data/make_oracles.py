"""Record what three older packages compute, so that the tests need not install them.

    pip install --no-deps --target A OpenNMT-py==3.5.1
    pip install --no-deps --target B transformers==4.35.2 tokenizers==0.14.1 huggingface_hub==0.17.3
    pip install --no-deps --target C transformers==4.57.6 tokenizers==0.22.1 huggingface_hub==0.36.0
    PYTHONPATH=A python tests/data/make_oracles.py opennmt > tests/data/opennmt.json
    PYTHONPATH=B python tests/data/make_oracles.py transfo_xl > tests/data/transfo_xl.json
    PYTHONPATH=C python tests/data/make_oracles.py bert > tests/data/bert.json

Each file holds the configuration, the weights, the input and the output, in float64 where the package allows.
"""

import json
import sys
import types
from pathlib import Path

import torch


def bare(package, *names):
    """Import a package's modules without running its __init__, which wants dependencies that are not needed here."""
    root = next(Path(p) / package for p in sys.path if (Path(p) / package).is_dir())
    for name in (package, *names):
        module = types.ModuleType(name)
        module.__path__ = [str(root.parent / name.replace(".", "/"))]
        sys.modules[name] = module


def listed(tensors):
    return {name: tensor.detach().double().tolist() for name, tensor in tensors.items()}


def opennmt():
    bare("onmt", "onmt.modules")
    from onmt.modules.multi_headed_attn import MultiHeadedAttention

    cases = []
    for causal in (False, True):
        torch.manual_seed(3)
        layer = MultiHeadedAttention(2, 8, dropout=0.0, max_relative_positions=2, attn_type="self").double().eval()
        for parameter in layer.parameters():  # left uninitialised by the package
            torch.nn.init.normal_(parameter, std=0.5)
        x = torch.randn(2, 7, 8).double()
        mask = torch.zeros(2, 1, 7, 7, dtype=torch.bool)
        mask[1, :, :, 5:] = True  # True: masked
        if causal:
            mask = mask | torch.ones(7, 7, dtype=torch.bool).triu(1)
        out, _ = layer(x, x, x, mask=mask)
        cases.append({"heads": 2, "k": 2, "causal": causal, "weights": listed(layer.state_dict()),
                      "x": x.tolist(), "mask": mask.tolist(), "out": out.tolist()})  # fmt: skip
    return {"package": "OpenNMT-py 3.5.1", "cases": cases}


def transfo_xl():
    from transformers.models.transfo_xl import modeling_transfo_xl as m

    cases = []
    for clamp in (-1, 4):
        torch.manual_seed(3)
        layer = m.RelPartialLearnableMultiHeadAttn(2, 8, 4, dropout=0.0, dropatt=0.0, pre_lnorm=False)
        layer = layer.eval()  # its mask value overflows in float64
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        embedding = m.PositionalEmbedding(8)
        x, memory = torch.randn(5, 2, 8), torch.randn(3, 2, 8)
        distances = torch.arange(7, -1, -1.0)
        if clamp > 0:
            distances.clamp_(max=clamp)
        mask = torch.ones(5, 8).triu(4)[:, :, None].bool()
        layer.layer_norm = torch.nn.Identity()
        out = layer(x, embedding(distances), attn_mask=mask, mems=memory)[0] - x
        weights = {k: v for k, v in layer.state_dict().items() if "layer_norm" not in k}
        cases.append({"heads": 2, "clamp_len": clamp, "weights": listed(weights), "x": x.tolist(),
                      "memory": memory.tolist(), "out": out.tolist()})  # fmt: skip
    return {"package": "transformers 4.35.2", "cases": cases}


def bert():
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    cases = []
    for kind in ("relative_key", "relative_key_query"):
        torch.manual_seed(3)
        config = BertConfig(hidden_size=8, num_attention_heads=2, max_position_embeddings=6,
                            position_embedding_type=kind, attention_probs_dropout_prob=0.0)  # fmt: skip
        layer = BertSelfAttention(config).double().eval()
        x = torch.randn(2, 6, 8).double()
        mask = torch.zeros(2, 1, 1, 6).double()
        mask[1, ..., 4:] = torch.finfo(torch.float32).min
        out = layer(x, attention_mask=mask)[0]
        cases.append({"heads": 2, "kind": kind, "max": 6, "weights": listed(layer.state_dict()),
                      "x": x.tolist(), "out": out.tolist(), "real": [6, 4]})  # fmt: skip
    return {"package": "transformers 4.57.6", "cases": cases}


if __name__ == "__main__":
    json.dump(globals()[sys.argv[1]](), sys.stdout)
    sys.stdout.write("\n")
