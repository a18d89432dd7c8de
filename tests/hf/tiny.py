"""Cases out of the tiny models that the families themselves are checked with, three rows instead of two."""

import torch

from tests.hf.harness import Case, scatter
from tests.seeds import seed


def make(family, folder):
    torch.manual_seed(seed(1))
    return scatter(family.tiny(folder)[0])


def batch(family, folder):
    """The inputs without their mask, other numbers in the first of them."""
    found = {name: x for name, x in family.tiny(folder)[1].items() if name != "attention_mask"}
    found = {name: torch.cat((x, x[:1])) for name, x in found.items()}
    name, x = next(iter(found.items()))
    return {**found, name: torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, 2, 30)}


def tiny_case(family, folder, **options):
    return Case(lambda: make(family, folder), lambda: batch(family, folder), **options)
