"""Safetensors files of a trial. The metadata has the trial's key, the kind of file and a SHA-256 of the whole content.
A damaged file, or a file of another trial, is refused: wrong weights would silently give wrong results.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import LabError

if TYPE_CHECKING:
    from .store import Store

ENTRY = "posenc"  # one metadata entry: safetensors writes several in any order, and equal content must give equal files


class Damaged(LabError):
    """A file of tensors that cannot be used and is computed again."""


def library() -> Any:
    """Import safetensors; raises LabError if it is missing, before the first training."""
    try:
        import numpy  # noqa: F401  needed for the bytes of a tensor
        import safetensors.torch
    except ImportError as error:
        raise LabError(f"the lab needs {error.name}, which is not installed: pip install 'posenc[lab]'") from None
    return safetensors


def dump(tensors: dict[str, Tensor], trial: str, kind: str, state: Any = None) -> bytes:
    """A file's content: the tensors of a trial, and a state as JSON."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {"trial": trial, "kind": kind, "state": state}
    about["sha256"] = _digest(flat, about)
    return library().torch.save(flat, {ENTRY: json.dumps(about, sort_keys=True)})


def load(content: bytes, trial: str, kind: str) -> tuple[dict[str, Tensor], Any]:
    """The tensors and the state of a file of this trial and kind; raises Damaged."""
    safetensors = library()
    try:
        tensors = safetensors.torch.load(content)
        size = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][ENTRY])
        digest = about.pop("sha256")
        owner, state = (about["trial"], about["kind"]), about["state"]
        whole = digest == _digest(tensors, about)
    except (safetensors.SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"it is not a file of a trial: {error}") from None
    if not whole:
        raise Damaged("its SHA-256 does not match")
    if owner != (trial, kind):
        raise Damaged(f"it holds {owner[1]} of the trial {owner[0]}")
    return tensors, state


def read(store: Store, trial: str, kind: str) -> tuple[dict[str, Tensor], Any] | None:
    """Load a file from a run's folder; None if there is none."""
    content = store.read(trial, kind)
    return None if content is None else load(content, trial, kind)


def find_damage(store: Store, trial: str, kind: str) -> str | None:
    """Why a file cannot be used; None if it can, or if there is none."""
    try:
        read(store, trial, kind)
    except Damaged as error:
        return str(error)
    return None


def _digest(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    """SHA-256 of everything that `load` returns: about, names, types, shapes and bytes."""
    ordered = [tensors[name] for name in sorted(tensors)]
    forms = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in zip(sorted(tensors), ordered)]
    whole = hashlib.sha256(json.dumps([about, forms], sort_keys=True).encode())
    for tensor in ordered:
        if tensor.numel():
            whole.update(tensor.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
    return whole.hexdigest()
