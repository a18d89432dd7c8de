"""Every task: its answers are right, its shapes agree, its loss counts the answers only."""

import pytest
import torch

from posenc.lab import tasks
from posenc.lab.errors import LabError, OptionError
from posenc.lab.tasks import BOS, FIRST, IGNORE, SEP

SYNTHETIC = [name for name in tasks.names() if name != "text"]


def one(text, size, count=4, seed=0):
    return tasks.create(text).batch(size, count, torch.Generator().manual_seed(seed))


def parts(row):
    """(question, answer) of a row of `question_and_answer`, from its inputs and targets."""
    inputs, targets = row
    cut = inputs.tolist().index(SEP)
    return inputs[1:cut].tolist(), targets[cut:].tolist()


def test_the_folder_has_the_documented_tasks():
    promised = {"copy", "reverse", "recall", "sort", "addition", "parity", "flipflop", "previous", "text"}
    assert promised <= set(tasks.names())


@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize("size", [2, 7, 33])
def test_shapes_symbols_and_repeatability(name, size):
    task = tasks.create(name)
    batch = one(name, size)
    assert batch.inputs.shape == batch.targets.shape
    assert batch.inputs.shape[1] == task.length(size)
    assert (batch.inputs[:, 0] == BOS).all()
    answers = batch.targets[batch.targets != IGNORE]
    assert len(answers) and answers.min() >= FIRST and answers.max() < task.vocabulary
    assert batch.inputs.min() >= 0 and batch.inputs.max() < task.vocabulary
    again, other = one(name, size), one(name, size, seed=1)
    assert torch.equal(batch.inputs, again.inputs)
    assert not torch.equal(batch.inputs, other.inputs)


@pytest.mark.parametrize("text", ["copy", "copy:unique=true", "reverse", "sort"])
def test_sequences(text):
    change = {"copy": list, "reverse": lambda q: q[::-1], "sort": sorted}[text.split(":")[0]]
    for row in zip(*one(text, 9)):
        question, answer = parts(row)
        assert len(question) == 9 and answer == change(question)
        if "unique" in text:
            assert len(set(question)) == 9


def test_a_problem_needs_enough_symbols():
    with pytest.raises(LabError, match="the task has 4"):
        one("copy:unique=true,symbols=4", 5)


def test_addition_adds():
    for row in zip(*one("addition", 6, count=32)):
        question, answer = parts(row)
        plus = question.index(FIRST + 10)
        a, b, total = (
            sum((digit - FIRST) * 10**position for position, digit in enumerate(digits))
            for digits in (question[:plus], question[plus + 1 :], answer)
        )
        assert a + b == total


def test_parity_and_recall():
    for row in zip(*one("parity", 11, count=16)):
        question, answer = parts(row)
        assert answer == [FIRST + sum(bit - FIRST for bit in question) % 2]
    task = tasks.create("recall")
    for row in zip(*one("recall", 13, count=16)):
        question, answer = parts(row)
        pairs = dict(zip(question[: 2 * task.pairs : 2], question[1 : 2 * task.pairs : 2]))
        assert len(pairs) == task.pairs and len(question) == 2 * task.pairs + 13 + 1
        assert answer == [pairs[question[-1]]]


def test_flipflop_reads_what_was_written():
    write, read = FIRST + 2, FIRST + 4
    reads = 0
    for inputs, targets in zip(*one("flipflop:noise=0.5", 40, count=8)):
        orders, bits = inputs[1::2].tolist(), [*inputs[2::2].tolist(), None]
        memory = None
        for position, (order, bit) in enumerate(zip(orders, bits)):
            target = int(targets[1 + 2 * position])
            if order == write:
                memory = bit
            if order == read:
                assert target == memory
                assert bit in (memory, None)
                reads += 1
            else:
                assert target == IGNORE
        assert (targets[::2] == IGNORE).all()
    assert reads > 20


def test_previous_and_neighbour_answer_with_the_right_position():
    batch = one("previous", 12)
    assert torch.equal(batch.targets[:, 2:], batch.inputs[:, 1:-1])
    assert (batch.targets[:, :2] == IGNORE).all()
    batch = one("neighbour:distance=3", 12)
    assert torch.equal(batch.targets[:, 1:13], batch.inputs[:, 4:])
    assert not tasks.create("neighbour").causal


def text_task(train=b"abcdefghij" * 50, held_out=bytes(range(200))):
    task = tasks.create("text")
    task.load(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)))
    return task


def test_text_windows_hold_the_same_bytes_at_every_length():
    task = text_task()
    for size in (10, 20, 50):
        batch = task.windows(size, 100)
        assert batch.targets.flatten().tolist() == list(range(100))
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        assert (batch.inputs[:, 0] == 256).all()


def test_sliding_windows_count_the_same_bytes_at_every_length():
    task = text_task()
    counted = [task.sliding(size, 8, 5, first=56).targets[:, -8:].flatten().tolist() for size in (8, 16, 64)]
    assert counted[0] == counted[1] == counted[2] == list(range(56, 96))
    with pytest.raises(LabError, match="too short"):
        task.sliding(64, 8, 100, first=56)


def test_a_wrong_specification_names_what_is_allowed():
    with pytest.raises(LabError, match="the tasks are"):
        tasks.create("copi")
    with pytest.raises(LabError, match="its options are symbols, unique"):
        tasks.create("copy:size=3")
    with pytest.raises(OptionError, match="OPTION=VALUE"):
        tasks.create("copy:unique")
