"""transformers' Trainer, and the accelerate library on its own: an accelerated model trains as the original does."""

import copy

import pytest
import torch
from transformers import Trainer, TrainingArguments

from posenc import hf
from tests.hf.uses.tiny import FAMILIES, batch, largest_difference, make, pair

pytest.importorskip("accelerate")


class Texts(torch.utils.data.Dataset):
    def __init__(self, family, count=16):
        self.given = batch(family, rows=count, length=13)
        self.given["attention_mask"][3:8, 9:] = 0

    def __len__(self):
        return len(self.given["input_ids"])

    def __getitem__(self, row):
        return {name: tensor[row] for name, tensor in self.given.items()}


def train(model, family, folder, *, resume=False, **options):
    """The weights after training."""
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, seed=3, data_seed=3,
        per_device_train_batch_size=2, learning_rate=1e-2, lr_scheduler_type="constant", optim="sgd",
        **{"max_steps": 4, "save_strategy": "no", **options},
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Texts(family))
    trainer.train(resume_from_checkpoint=resume)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(weights, model):
    """What training added to the weights: weights themselves would agree whatever it does."""
    return {name: weights[name] - parameter for name, parameter in model.named_parameters()}


def distance(ours, theirs):
    """The largest difference of a parameter, relative to the largest step of any."""
    size = max(one.norm() for one in theirs.values())
    assert size > 1e-3
    return (max((ours[name] - theirs[name]).norm() for name in theirs) / size).item()


def check(family, folder, way):
    original, model = pair(family)
    before = copy.deepcopy(original)
    exact = copy.deepcopy(original)
    theirs = moved(train(original, family, folder / "theirs", **WAYS[way]), before)
    ours = moved(train(model, family, folder / "ours", **WAYS[way]), before)
    if way == "bf16":  # twice the error of the original, compared with float32
        exact = moved(train(exact, family, folder / "exact"), before)
        assert distance(ours, exact) <= 2 * distance(theirs, exact)
    else:
        assert distance(ours, theirs) <= 1e-4


WAYS = {
    "accumulation": dict(gradient_accumulation_steps=2),
    "bf16": dict(bf16=True),
    "checkpointing": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}),
    "checkpointing, reentrant": dict(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
}
HAVE_NONE = {"mpnet": "checkpointing"}  # the original has no gradient checkpointing
RAISES = [("deberta", "checkpointing, reentrant")]  # the original raises: all layers share a graph outside of them
FORMS = [
    (family, way)
    for family in FAMILIES
    for way in WAYS
    if not way.startswith(HAVE_NONE.get(family, "none")) and (family, way) not in RAISES
]
QUICK = [("t5", "accumulation"), ("llama", "bf16"), ("deberta", "checkpointing")]


@pytest.mark.parametrize("family, way", QUICK)
def test_trainer(family, way, tmp_path):
    check(family, tmp_path, way)


@pytest.mark.slow
@pytest.mark.parametrize("family, way", [form for form in FORMS if form not in QUICK])
def test_trainer_with_every_family(family, way, tmp_path):
    check(family, tmp_path, way)


def resumed(family, folder, **more):
    whole = train(hf.accelerate(make(family)), family, folder / "whole", **more)
    options = dict(save_strategy="steps", save_steps=2, **more)
    train(hf.accelerate(make(family)), family, folder / "parts", **options)
    again = hf.accelerate(make(family, base=9))  # other weights, which the checkpoint replaces
    found = train(again, family, folder / "parts", resume=str(folder / "parts" / "checkpoint-2"), **options)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("family", ["t5"])
def test_resume(family, tmp_path):
    resumed(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "t5"])
def test_resume_with_every_family(family, tmp_path):
    resumed(family, tmp_path, gradient_accumulation_steps=2)


def by_accelerate(model, family):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Texts(family, count=8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for given in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**given).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return dict(accelerator.unwrap_model(model).named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_accelerate_library(family):
    original, model = pair(family)
    before = copy.deepcopy(original)
    theirs, ours = (moved(by_accelerate(one.train(), family), before) for one in (original, model))
    theirs = {name: one.detach() for name, one in theirs.items() if one.abs().max() > 1e-4}
    assert len(theirs) > 10
    assert largest_difference({name: ours[name].detach() for name in theirs}, theirs) < 1e-3
