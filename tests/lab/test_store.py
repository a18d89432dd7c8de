"""Files are complete or absent; tensors belong to a trial and damage is refused; settings determine the key."""

import errno
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from posenc.lab import store, tensor_files, trials
from posenc.lab.errors import LabError
from posenc.lab.store import MemoryStore, Store
from posenc.lab.trials import Training

TRAINING = Training(
    task="previous", encoding="alibi", seed=0, train=8, steps=10, batch=4, width=16, heads=2, layers=1, lr=1e-3,
    position_lr=1.0, weight_decay=0.0, device="cpu", precision="float32", compile=False, engine="auto", text="",
)  # fmt: skip


def test_every_setting_changes_the_key():
    changed = {
        name: replace(TRAINING, **{name: value + "x" if isinstance(value, str) else value + 1})
        for name, value in vars(TRAINING).items()
    }
    keys = {TRAINING.key, *(other.key for other in changed.values())}
    assert len(keys) == len(changed) + 1
    assert trials.key({"a": 1, "b": 2}) == trials.key({"b": 2, "a": 1})
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
        "with Store(sys.argv[1]).lock(): print('in', flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=env) as other:
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(LabError, match=f"process {other.pid}"), folder.lock():
            pass
        other.kill()
    (tmp_path / "trials" / ".x.weights.1.part").write_bytes(b"half")
    with folder.lock():
        assert not list(tmp_path.rglob("*.part"))


def test_files_are_sent_to_a_store_in_memory_and_back(run_folder, tmp_path):
    kept = Store(run_folder)
    train, test = (next(run_folder.glob(f"trials/*.{kind}.json")).name.split(".")[0] for kind in ("train", "test"))
    carried = kept.files([train, test])
    assert set(carried) == {f"{train}.train.json", f"{train}.weights", f"{test}.test.json"}
    memory = MemoryStore(carried)
    assert memory.get(train, "train.json") == kept.get(train, "train.json")
    assert memory.files([train, test]) == carried and memory.read("other", "weights") is None
    memory.drop(train, "weights")
    assert set(memory.files([train])) == {f"{train}.train.json"}
    other = Store(tmp_path)
    other.add(carried)
    assert other.files([train, test]) == carried
    for name in ("../evil", "a.b", "x/y.weights", ".weights", "a.weights.part"):
        with pytest.raises(LabError, match="not a file of a trial"):
            other.add({name: b""})


def test_a_damaged_record_counts_as_none(tmp_path):
    kept = Store(tmp_path)
    kept.put("k", "note.json", {"x": 1.25, "y": [1, None]})
    path = kept.path("k", "note.json")
    content = path.read_bytes()
    assert kept.get("k", "note.json") == {"x": 1.25, "y": [1, None]}
    deep = b"[" * 100_000
    for damage in (b"", content[:-2], content.replace(b"1.25", b"1.26"), b"[]", b"{}", b"\xff\xfe", deep, b"NaN"):
        path.write_bytes(damage)
        assert kept.get("k", "note.json") is None
    path.write_bytes(content)
    assert kept.get("k", "note.json") is not None
    os.replace(path, kept.path("other", "note.json"))
    assert kept.get("other", "note.json") is None


def test_a_record_with_a_right_digest_is_validated_too(run_copy):
    """Anybody can write a digest: the values and the settings of a record are validated too."""
    kept = Store(run_copy)
    key = next(run_copy.glob("trials/*.train.json")).name.split(".")[0]
    record = kept.get(key, "train.json")
    for change in ({"curve": [[1, "x"]]}, {"curve": 3}, {"seconds": -1.0}, {"memory": "much"}, {"status": None},
                   {"settings": {**record["settings"], "seed": 77}}, {"settings": []}):  # fmt: skip
        kept.put(key, "train.json", {**record, **change})
        assert kept.get(key, "train.json") is None, change
    kept.put(key, "train.json", record)
    assert kept.get(key, "train.json") == record


TENSORS = {
    "a": torch.randn(3, 5), "b": torch.randn(4).bfloat16(), "c": torch.tensor(7.0), "d": torch.arange(6).view(2, 3),
    "e": torch.empty(0, 3), "f": torch.randn(2, 2).double().t(),
}  # fmt: skip


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_tensors_and_state_are_restored(tmp_path):
    content = tensor_files.dump(TENSORS, "trial", "weights", {"step": 3})
    assert content == tensor_files.dump(TENSORS, "trial", "weights", {"step": 3})  # files of one trial are equal
    ours, state = tensor_files.load(content, "trial", "weights")
    assert state == {"step": 3} and same(ours, TENSORS) and same(safetensors.torch.load(content), TENSORS)
    kept = Store(tmp_path)
    assert (
        tensor_files.read(kept, "trial", "weights") is None
        and tensor_files.find_damage(kept, "trial", "weights") is None
    )
    kept.write("trial", "weights", content)
    assert same(tensor_files.read(kept, "trial", "weights")[0], TENSORS)
    kept.write("other", "weights", content)
    assert "weights of the trial trial" in tensor_files.find_damage(kept, "other", "weights")


def test_tensors_of_another_trial_or_kind_or_without_a_digest_are_refused():
    content = tensor_files.dump(TENSORS, "trial", "weights")
    with pytest.raises(tensor_files.Damaged, match="it holds weights of the trial trial"):
        tensor_files.load(content, "another", "weights")
    with pytest.raises(tensor_files.Damaged, match="it holds weights"):
        tensor_files.load(content, "trial", "checkpoint")
    for metadata in (
        None,
        {"x": "y"},
        {"posenc": "{}"},
        {"posenc": "["},
        {"posenc": '{"trial": "trial", "kind": "weights"}'},
    ):
        bare = safetensors.torch.save({"a": TENSORS["a"]}, metadata)
        with pytest.raises(tensor_files.Damaged, match="not a file of a trial"):
            tensor_files.load(bare, "trial", "weights")


def test_damage_of_many_bytes_is_refused_or_changes_nothing():
    """Bytes changed, removed, inserted, swapped; as often in the header as in the data."""
    content = tensor_files.dump(TENSORS, "trial", "weights", {"step": 3})
    header = 8 + int.from_bytes(content[:8], "little")
    draw, count, refused = random.Random(0), 20_000, 0
    for _ in range(count):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 8)):
            start = draw.randrange(draw.choice((header, len(content))))
            size = draw.choice((1, 1, 1, 2, 8))
            match draw.randrange(5):
                case 0 | 1:
                    damaged[start : start + size] = draw.randbytes(size)
                case 2:
                    del damaged[start : start + size]
                case 3:
                    damaged[start:start] = draw.choice((b" ", b"0", b"1", b'"', b"a", b"}", b"\0"))
                case 4:
                    other = draw.randrange(max(1, len(damaged)))
                    a, b = damaged[start : start + size], damaged[other : other + size]
                    if len(a) == len(b) == size:
                        damaged[start : start + size], damaged[other : other + size] = b, a
        try:
            ours, state = tensor_files.load(bytes(damaged), "trial", "weights")
        except tensor_files.Damaged:
            refused += 1
        else:
            assert state == {"step": 3} and same(ours, TENSORS), bytes(damaged)
    assert refused > 0.9 * count
