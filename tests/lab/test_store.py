"""Files are whole or absent; tensors are the safetensors format; settings name their results."""

import errno
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from posenc.lab import cells, store, tensors
from posenc.lab.cells import Training
from posenc.lab.errors import LabError
from posenc.lab.store import Store

TRAINING = Training(
    task="previous", scheme="alibi", seed=0, train=8, steps=10, batch=4, width=16, heads=2, layers=1, lr=1e-3,
    position_lr=1.0, weight_decay=0.0, device="cpu", precision="float32", compile=False, engine="auto", text="",
)  # fmt: skip


def test_every_setting_changes_the_key():
    changed = {
        name: replace(TRAINING, **{name: value + "x" if isinstance(value, str) else value + 1})
        for name, value in vars(TRAINING).items()
    }
    keys = {TRAINING.key, *(other.key for other in changed.values())}
    assert len(keys) == len(changed) + 1
    assert cells.key({"a": 1, "b": 2}) == cells.key({"b": 2, "a": 1})
    assert TRAINING.key == replace(TRAINING).key


def test_a_failed_write_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    path = tmp_path / "file"
    store.write(path, b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, full)
            with pytest.raises(LabError, match="no space left.*run the same command again"):
                store.write(path, b"new")
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_for_real(tmp_path, monkeypatch):
    path = tmp_path / "file"
    opened = open
    monkeypatch.setattr(
        "builtins.open", lambda name, *rest: opened("/dev/full" if "part" in str(name) else name, *rest)
    )
    with pytest.raises(LabError, match="no space left"):
        store.write(path, b"new" * 10000)
    assert not path.exists()


def test_one_command_at_a_time_even_after_a_kill(tmp_path):
    folder = Store(tmp_path)
    code = (
        "import sys, time; from posenc.lab.store import Store\n"
        "with Store(sys.argv[1]).alone(): print('in', flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=env) as other:
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(LabError, match=f"process {other.pid}"), folder.alone():
            pass
        other.kill()
    (tmp_path / "cells" / ".x.weights.1.part").write_bytes(b"half")
    with folder.alone():
        assert not list(tmp_path.rglob("*.part"))


def test_records_and_carried_files(tmp_path):
    a, b = Store(tmp_path / "a"), Store(tmp_path / "b")
    assert a.get("k", "train.json") is None
    a.put("k", "train.json", {"x": 1})
    store.write(a.path("k", "weights"), b"w")
    a.put("other", "train.json", {})
    b.add(a.files(["k"]))
    assert b.get("k", "train.json") == {"x": 1} and b.path("k", "weights").read_bytes() == b"w"
    assert not b.has("other", "train.json")
    with pytest.raises(LabError, match="not a file name"):
        b.add({"../evil": b""})


def test_a_damaged_record_is_as_good_as_none(tmp_path):
    kept = Store(tmp_path)
    kept.put("k", "train.json", {"x": 1.25, "y": [1, None]})
    path = kept.path("k", "train.json")
    content = path.read_bytes()
    assert kept.get("k", "train.json") == {"x": 1.25, "y": [1, None]}
    for damage in (b"", content[:-2], content.replace(b"1.25", b"1.26"), b"[]", b"{}", b"\xff\xfe"):
        path.write_bytes(damage)
        assert kept.get("k", "train.json") is None
    path.write_bytes(content)
    assert kept.get("k", "train.json") is not None
    os.replace(path, kept.path("other", "train.json"))
    assert kept.get("other", "train.json") is None


def test_tensors_are_read_by_safetensors_and_back(tmp_path):
    saved = {
        "a": torch.randn(3, 5), "b": torch.randn(4).bfloat16(), "c": torch.tensor(7.0), "d": torch.arange(6).view(2, 3),
        "e": torch.empty(0, 3), "f": torch.randn(2, 2).double().t(),
    }  # fmt: skip
    path = tmp_path / "t.safetensors"
    path.write_bytes(tensors.dump(saved, {"note": "n"}))
    theirs = safetensors.torch.load_file(path)
    ours, note = tensors.load(path)
    assert note == {"note": "n"} and theirs.keys() == ours.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(theirs[name], tensor) and torch.equal(ours[name], tensor)
        assert ours[name].dtype == tensor.dtype
    safetensors.torch.save_file({"x": saved["a"]}, path)
    assert torch.equal(tensors.load(path)[0]["x"], saved["a"])


@pytest.mark.parametrize("cut", [4, 30, -3])
def test_broken_tensor_files_are_refused(tmp_path, cut):
    path = tmp_path / "t"
    content = tensors.dump({"a": torch.randn(9)}, {"note": "n"})
    path.write_bytes(content[:cut])
    with pytest.raises(LabError, match="not a whole safetensors file"):
        tensors.load(path)
    flipped = bytearray(content)
    flipped[cut] ^= 1
    path.write_bytes(flipped)
    assert not tensors.sound(path)
    path.write_bytes(content)
    assert tensors.sound(path) and not tensors.sound(tmp_path / "none")
