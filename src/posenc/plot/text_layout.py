"""Break titles into lines: at spaces, and in Chinese between any two characters that typography allows to part."""

from __future__ import annotations

import re
from functools import lru_cache

NOT_FIRST = set("，。、；：！？）」』》〉】”’…％%,.;:!?)]}")
"""Characters that never open a line."""
NOT_LAST = set("（「『《〈【“‘([{±")
"""Characters that never end a line."""
TIGHT = re.compile(r"(?<=\w) ([−=×/]) (?=\w)")
"""Operators whose operands stay on their line."""
WORDS = re.compile(
    "位置|注意力|查询|词元|得分|距离|编码|长度|训练|未训练|对角线|作用|通道对?|相位|波长|相似度?|方向|贡献|常数|向量|余弦|正弦|绝对|相对|每个|"
    "最后|一个|变化|衰减|振荡|远场|旋转|范围|超出|数值|权重|交换|平移|顺序|恢复|改变|影响|内容|所有|不同|相同|对应|为止|任何|完成|以前|落在|只有|没有"
)
"""Chinese words of the figures' titles: no line ends inside one."""
INSIDE = 0.3
"""The cost of a line that ends between two Chinese characters; that of an empty line is 1."""


def is_wide(character: str) -> bool:
    """Whether a character is as wide as two Latin letters."""
    return ord(character) > 0x2E80


def columns_of(text: str) -> int:
    """The width of a text in Latin letters."""
    return sum(1 + is_wide(character) for character in text)


@lru_cache(maxsize=512)
def break_lines(text: str, most: int) -> tuple[str, ...]:
    """The text in lines of at most `most` Latin letters: no more lines than necessary, of about equal length, and in
    Chinese after punctuation or a space rather than inside a word.
    """
    pieces = _pieces(TIGHT.sub("\u00a0\\1\u00a0", text))
    number = len(_fill(pieces, most))
    return (text,) if number == 1 else tuple(_even(pieces, most, number))


def wrap(text: str, most: int) -> str:
    """The lines of a text as HTML, with <br> between them."""
    return "<br>".join(line.replace("&", "&amp;").replace("<", "&lt;") for line in break_lines(text, most))


def _even(pieces: list[str], most: int, number: int) -> list[str]:
    """The pieces in `number` lines with the smallest sum of (share of the line that is empty)² and breaks inside words."""
    ends = range(1, len(pieces) + 1)
    best: dict[int, tuple[float, list[str]]] = {0: (0.0, [])}
    for _ in range(number):
        after: dict[int, tuple[float, list[str]]] = {}
        for start, (cost, lines) in best.items():
            for end in ends[start:]:
                line = "".join(pieces[start:end]).strip(" ")
                width = columns_of(line)
                if width > most and end > start + 1:
                    break
                last = line[-1:] or " "
                inside = end < len(pieces) and is_wide(last) and last not in NOT_FIRST and pieces[end][0] != " "
                total = cost + (1.0 - width / most) ** 2 + INSIDE * inside
                if end not in after or total < after[end][0]:
                    after[end] = (total, [*lines, line])
        best = after
    return best[len(pieces)][1] if len(pieces) in best else _fill(pieces, most)


def _pieces(text: str) -> list[str]:
    """The parts of a text between which a line may end; a space opens the piece that follows it."""
    pieces: list[str] = []
    kept = {n for found in WORDS.finditer(text) for n in range(found.start() + 1, found.end())}
    for n, character in enumerate(text):
        before = pieces[-1][-1] if pieces else ""
        bound = before == " " or before in NOT_LAST or character in NOT_FIRST or n in kept
        if pieces and character != " " and (bound or not (is_wide(character) or is_wide(before))):
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


def _fill(pieces: list[str], most: int) -> list[str]:
    lines, line = [], ""
    for piece in pieces:
        if line and columns_of(line + piece) > most:
            lines.append(line.rstrip())
            piece, line = piece.lstrip(" "), ""
        line += piece
    return [*lines, line]
