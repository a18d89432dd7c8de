"""attn_implementation="posenc" given to a constructor whose layers look their attention up by name.

    SAM_VISION_ATTENTION_CLASSES = {"eager": SamVisionAttention, "sdpa": SamVisionSdpaAttention}
    self.attn = SAM_VISION_ATTENTION_CLASSES[config._attn_implementation](config, window_size)

Such a dict is that file's own door, and another name in it is all that these models need: without it, `from_pretrained(...,
attn_implementation="posenc")` is a KeyError. These layers call no attention interface, so the name stands for "sdpa", or for "eager"
where there is no other, which the configuration has from then on; `accelerate` overrides those with a positional term.
"""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from .layer import log_once

FILES = (
    "bark.modeling_bark", "data2vec.modeling_data2vec_vision", "deepseek_ocr2.modeling_deepseek_ocr2", "falcon.modeling_falcon",
    "git.modeling_git", "gpt_neo.modeling_gpt_neo", "gptj.modeling_gptj", "sam.modeling_sam", "sam_hq.modeling_sam_hq",
    "superglue.modeling_superglue", "unlimited_ocr.modeling_unlimited_ocr",
)  # fmt: skip
"""Files of transformers.models with such a dict in some release; those that this release does not have are left out."""


def register(name: str) -> None:
    """Add the name to the dicts of classes of every file."""
    for file in FILES:
        try:
            module = import_module(f"transformers.models.{file}")
        except ImportError:
            continue
        for table in [value for value in vars(module).values() if isinstance(value, dict)]:
            if inspect.isclass(kind := table.get("eager")) and issubclass(kind, nn.Module):
                table.setdefault(name, partial(_construct, table, name))


def _construct(table: dict[str, type[nn.Module]], name: str, config: Any, *args: Any, **kwargs: Any) -> nn.Module:
    instead = "sdpa" if "sdpa" in table else "eager"
    kind = table[instead]
    log_once(
        f"{kind.__name__} calls no attention interface: attn_implementation={name!r} is {instead!r} there; "
        "posenc.hf.accelerate(model) overrides it where it can"
    )
    config._attn_implementation = instead
    return kind(config, *args, **kwargs)
