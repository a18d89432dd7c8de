"""Uniform registers of machine code (sm_90) that may be read before they are set: data flow over all paths."""

from __future__ import annotations

import re

Line = tuple[int, str]  # address and text


def find_unset(lines: list[Line]) -> list[str]:
    """What reads such a register. Copies to other registers do not count: ptxas saves registers that hold nothing."""
    states, effects = _flow(lines)
    faults = []
    for (at, text), state, (_, reads) in zip(lines, states, effects, strict=True):
        name = _name(text)
        if state is not None and not name.startswith(("MOV", "IMAD.MOV", "IMAD.U32")):
            faults += [f"UR{x} may not be set at {at:x}: {text}" for x in sorted(reads - state)]
    return faults


def _flow(lines: list[Line]):
    """Which registers are set before each instruction on every path to it (None: no path), and what each writes and reads."""
    number = {at: i for i, (at, _) in enumerate(lines)}
    effects = [_effects(text) for _, text in lines]
    following = [_following(i, text, number, len(lines)) for i, (_, text) in enumerate(lines)]
    states: list[frozenset[int] | None] = [None] * len(lines)
    roots = [0]
    at_table = frozenset()  # what is set where a jump through a table begins
    while roots:
        states[roots[0]] = at_table
        todo = [roots[0]]
        while todo:
            i = todo.pop()
            after = states[i] | effects[i][0]
            for j in following[i]:
                state = states[j]
                merged = after if state is None else state & after
                if merged != state:
                    states[j] = merged
                    todo.append(j)
        # what a jump through a table reaches: the roles of other warps
        jumps = [
            state
            for state, (_, text) in zip(states, lines, strict=True)
            if _name(text).startswith("BRX") and state is not None
        ]
        at_table = frozenset.intersection(*jumps) if jumps else frozenset()
        roots = [
            i for i, state in enumerate(states) if state is None and not _name(lines[i][1]).startswith(("NOP", "BRA"))
        ][:1]
    return states, effects


def _following(i: int, text: str, number: dict[int, int], count: int) -> list[int]:
    name, next_one = _name(text), [i + 1] if i + 1 < count else []
    if name.startswith("BRA"):
        target = number.get(int(re.search(r"0x([0-9a-f]+)", text)[1], 16))
        is_conditional = re.search(r"\bU?P\d", text) is not None
        return ([] if target is None else [target]) + (next_one if is_conditional else [])
    if name.startswith(("EXIT", "BRX", "RET")):
        return next_one if text.startswith("@") else []
    return next_one


def _effects(text: str) -> tuple[frozenset[int], frozenset[int]]:
    """Uniform registers that an instruction writes, and those that it reads."""
    name = _name(text)
    operands = re.sub(r"^@!?\w+\s+", "", text.strip())[len(name) :]
    written = re.match(r"\s*(?:U?P\w+,\s*)*UR(\d+)\b", operands)
    is_wide = ".64" in name or "WIDE" in name
    if written and re.match(r"(U|R2UR|S2UR)", name):
        first = int(written[1])
        reads = {int(x) for x in re.findall(r"\bUR(\d+)\b", operands[written.end() :])}
        return frozenset({first, first + is_wide}), frozenset(reads)
    reads = {int(x) for x in re.findall(r"\bUR(\d+)\b", operands)}
    for x in re.findall(r"gdesc\[UR(\d+)\]", operands):
        first = int(x)
        if "HGMMA" in name:  # descriptors of both operands; only the second counts where the first is in registers
            in_registers = re.match(r"\s*R\d+,\s*R\d+", operands) is not None
            reads = (reads - {first}) | set(range(first + 2 * in_registers, first + 4))
    return frozenset(), frozenset(reads)


def _name(text: str) -> str:
    return re.sub(r"^@!?\w+\s+", "", text.strip()).split()[0]
