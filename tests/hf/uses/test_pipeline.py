"""`pipeline` and sentence-transformers: texts of several lengths, padded in batches by the libraries themselves."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, pipeline

from posenc import hf
from tests.hf.uses.tiny import WORDS, make, pair

TEXTS = ["w5 w6 w7 w8 w9", "w10 w11", "w12 w13 w14 w15 w16 w17 w18 w19 w20 w21 w22"]


def tokenizer(side="right"):
    words = ["<pad>", "</s>", "<mask>", *(f"w{number}" for number in range(3, WORDS))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        mask_token="<mask>",
        unk_token="w3",
        padding_side=side,
    )


@pytest.mark.parametrize("family", ["deberta", "mpnet"])
def test_fill_mask(family):
    texts = [text.replace("w6", "<mask>", 1).replace("w13", "<mask>", 1) for text in TEXTS[::2]]
    answers = [
        pipeline("fill-mask", model=model, tokenizer=tokenizer(), device="cpu")(texts, batch_size=2, top_k=3)
        for model in pair(family)
    ]
    for wanted, found in zip(*answers, strict=True):
        assert [one["token"] for one in found] == [one["token"] for one in wanted]
        assert [one["score"] for one in found] == pytest.approx([one["score"] for one in wanted], rel=1e-3)


@pytest.mark.parametrize("family", ["bloom", "mpt", "llama"])
def test_text_generation(family):
    options = dict(max_new_tokens=5, do_sample=False, batch_size=3)
    wanted, found = (
        pipeline("text-generation", model=model, tokenizer=tokenizer("left"), device="cpu")(TEXTS, **options)
        for model in pair(family)
    )
    assert found == wanted
    assert len({one[0]["generated_text"] for one in found}) == 3


def test_text_to_text():
    """transformers 5 has no pipeline for it: the tokenizer and `generate`."""
    words = tokenizer()
    given = words(TEXTS, padding=True, return_tensors="pt")
    given.pop("token_type_ids", None)
    wanted, found = (words.batch_decode(model.generate(**given, max_new_tokens=5, num_beams=2)) for model in pair("t5"))
    assert found == wanted


@pytest.mark.parametrize("family", ["mpnet", "deberta"])
def test_sentence_transformers(family, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    parts = pytest.importorskip("sentence_transformers.models")
    make(family).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)

    def load():
        words = parts.Transformer(str(tmp_path))
        pooling = parts.Pooling(32)
        return sentence_transformers.SentenceTransformer(modules=[words, pooling], device="cpu")

    original, model = load(), load()
    hf.accelerate(model)
    assert len(hf.report(model).layers) == 2
    wanted, found = (one.encode(TEXTS, batch_size=2, convert_to_tensor=True) for one in (original, model))
    assert (found - wanted).abs().max() < 1e-4
    assert torch.equal(torch.cdist(found, found).argsort(), torch.cdist(wanted, wanted).argsort())

    gradients = []
    for one in (original, model):
        features = one.tokenize(TEXTS)
        one.train()
        torch.manual_seed(0)
        for module in one.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        one(features)["sentence_embedding"].square().sum().backward()
        gradients.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    size = max(one.norm() for one in gradients[0].values())
    assert gradients[0].keys() == gradients[1].keys()
    assert max((gradients[1][name] - gradients[0][name]).norm() for name in gradients[0]) < 1e-4 * size

    model.save(str(tmp_path / "saved"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    hf.restore(again)
    assert (
        again.encode(TEXTS, convert_to_tensor=True) - model.eval().encode(TEXTS, convert_to_tensor=True)
    ).abs().max() < 1e-4
