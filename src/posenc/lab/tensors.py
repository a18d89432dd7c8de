"""Tensors in a file (safetensors) that knows whose it is: the metadata has the cell's key, what the file is for, and a
SHA-256 of all of it. A damaged file, or one under another cell's name, is refused: a wrong weight would be a wrong
result, and nothing else would tell.
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

ENTRY = "posenc"  # one entry of metadata, for safetensors writes several in any order and files of one cell are equal


class Damaged(LabError):
    """A file of tensors that cannot be used; whoever needs it computes it again."""


def library() -> Any:
    """safetensors, or a sentence: asked for before any work is done."""
    try:
        import numpy  # noqa: F401  the bytes of a tensor are reached through it
        import safetensors.torch
    except ImportError as error:
        raise LabError(f"the lab needs {error.name}, which is not installed: pip install 'posenc[lab]'") from None
    return safetensors


def dump(tensors: dict[str, Tensor], cell: str, kind: str, state: Any = None) -> bytes:
    """A file's content: the tensors of a cell, and a state that JSON can hold."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {"cell": cell, "kind": kind, "state": state}
    about["sha256"] = _digest(flat, about)
    return library().torch.save(flat, {ENTRY: json.dumps(about, sort_keys=True)})


def load(content: bytes, cell: str, kind: str) -> tuple[dict[str, Tensor], Any]:
    """The tensors and the state of a file that was written for this cell and kind."""
    safetensors = library()
    try:
        tensors = safetensors.torch.load(content)
        size = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][ENTRY])
        digest = about.pop("sha256")
        owner, state = (about["cell"], about["kind"]), about["state"]
        whole = digest == _digest(tensors, about)
    except (safetensors.SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"it is no file of a cell: {error}") from None
    if not whole:
        raise Damaged("its content is not what was written (SHA-256)")
    if owner != (cell, kind):
        raise Damaged(f"it holds {owner[1]} of the cell {owner[0]}")
    return tensors, state


def read(store: Store, cell: str, kind: str) -> tuple[dict[str, Tensor], Any] | None:
    """The same from a run's folder; None where there is no such file."""
    content = store.read(cell, kind)
    return None if content is None else load(content, cell, kind)


def damage(store: Store, cell: str, kind: str) -> str | None:
    """What is wrong with a file; None where nothing is, or where there is none."""
    try:
        read(store, cell, kind)
    except Damaged as error:
        return str(error)
    return None


def _digest(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    """Of everything that a reader gets: about, names, types, shapes and bytes."""
    ordered = [tensors[name] for name in sorted(tensors)]
    forms = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in zip(sorted(tensors), ordered)]
    whole = hashlib.sha256(json.dumps([about, forms], sort_keys=True).encode())
    for tensor in ordered:
        if tensor.numel():
            whole.update(tensor.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
    return whole.hexdigest()
