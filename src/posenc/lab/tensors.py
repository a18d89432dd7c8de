"""Tensors in a file, without pickle: the safetensors format, whose whole specification is one line.

    8 bytes: n, little endian │ n bytes of JSON: {name: {dtype, shape, data_offsets}, "__metadata__": {..}} │ the data

Written here so that a training machine needs nothing but torch; the safetensors package reads these files. The
metadata has a digest of the rest, so that damage is seen: a wrong weight would be a wrong result.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from .errors import LabError

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in TYPES.items()}
DIGEST = "sha256"


def dump(tensors: dict[str, Tensor], note: dict[str, str] | None = None) -> bytes:
    """A file's content."""
    header: dict[str, object] = {}
    parts, place = [], 0
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""
        header[name] = {
            "dtype": NAMES[flat.dtype],
            "shape": list(flat.shape),
            "data_offsets": [place, place + len(data)],
        }
        parts.append(data)
        place += len(data)
    data = b"".join(parts)
    header["__metadata__"] = {**(note or {}), DIGEST: _digest(header, note or {}, data)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    return len(text).to_bytes(8, "little") + text + data


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and its note."""
    content = path.read_bytes()
    try:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        note = header.pop("__metadata__", {})
        if DIGEST in note and note.pop(DIGEST) != _digest(header, note, content[8 + size :]):
            raise ValueError("its digest is another")
        tensors = {name: _tensor(entry, content, 8 + size) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(f"{path} is not a whole safetensors file ({error}); delete it and run again") from None
    return tensors, note


def sound(path: Path) -> bool:
    """Whether there is a file and nothing is wrong with it."""
    try:
        load(path)
    except (LabError, OSError):
        return False
    return True


def _digest(header: dict, note: dict[str, str], data: bytes) -> str:
    whole = hashlib.sha256(json.dumps([header, note], sort_keys=True).encode())
    whole.update(data)
    return whole.hexdigest()


def _tensor(entry: dict, content: bytes, base: int) -> Tensor:
    dtype = TYPES[entry["dtype"]]
    start, stop = entry["data_offsets"]
    number = math.prod(entry["shape"])
    if not 0 <= start <= stop <= len(content) - base or stop - start != number * dtype.itemsize:
        raise ValueError("a tensor lies outside the file")
    if number == 0:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(content[base + start : base + stop]), dtype=dtype).reshape(entry["shape"])
