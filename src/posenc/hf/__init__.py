"""posenc.hf: the drop-in for Hugging Face transformers.

    posenc.hf.accelerate(model)      attention on posenc's engines: same numbers, a fraction of the memory
    posenc.hf.report(model)          what was swapped, and which engine runs
    posenc.hf.extend(model, scaling) a longer context for a rotary model, configuration included
    posenc.hf.to_posenc(layer)       one attention layer as a posenc.Attention; from_posenc brings it back
    posenc.hf.restore(model)         undo

Importing it registers attn_implementation="posenc" with transformers. One model instance at a time; the library itself is
never changed.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .convert import from_posenc as from_posenc
    from .convert import to_posenc as to_posenc
    from .extension import extend as extend
    from .swap import UnsupportedModel as UnsupportedModel
    from .swap import accelerate as accelerate
    from .swap import report as report
    from .swap import restore as restore

_NAMES = {
    "accelerate": "swap", "restore": "swap", "report": "swap", "UnsupportedModel": "swap",
    "extend": "extension", "to_posenc": "convert", "from_posenc": "convert",
}  # fmt: skip

__all__ = sorted(_NAMES)

if not TYPE_CHECKING:
    try:
        _import_module("posenc.hf.interface")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "transformers":
            raise

    def __getattr__(name: str):
        if name not in _NAMES:
            raise AttributeError(f"module 'posenc.hf' has no attribute {name!r}")
        try:
            value = getattr(_import_module(f"posenc.hf.{_NAMES[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "transformers":
                raise
            raise ImportError("posenc.hf needs transformers 5.16 or later: pip install 'posenc[hf]'") from error
        globals()[name] = value
        return value
