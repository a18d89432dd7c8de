"""Texts of the course's figures, in English and in Simplified Chinese, by key."""

from __future__ import annotations

from . import translations
from .translations import Translation

TEXTS: dict[str, tuple[str, str]] = {
    "no positions": ("no positions", "无位置"),
    "no positions, causal mask": ("no positions, causal mask", "无位置，因果掩码"),
    "swap title": (
        "Change of each other token's output when tokens 2 and {other} swap places",
        "词元 2 与词元 {other} 交换位置时，其余每个词元输出的变化",
    ),
    "token": ("token", "词元"),
    "largest change": ("largest change", "最大变化"),
    "dot product": ("dot product", "点积"),
    "similarity title": (
        "PE(100)·PE(p): largest at p = 100, symmetric around it",
        "PE(100)·PE(p)：在 p = 100 处最大，左右对称",
    ),
    "rows": ("{rows} rows", "{rows} 行"),
    "rows resized": ("{rows} rows after resize", "resize 后的 {rows} 行"),
    "table title": ("Channel 2 of a table with 64 rows", "64 行的表的第 2 个通道"),
    "resized title": ("The same channel after resize({rows})", "resize({rows}) 之后的同一通道"),
    "every pair": ("a[i, j, :] for every pair: L² d", "每一对的 a[i, j, :]：L² d"),
    "every distance": (
        "q·a per clipped distance, then gathered: H L (2k+1)",
        "先算每个截断距离的 q·a，再取用：H L (2k+1)",
    ),
    "memory title": (
        "Memory of the relative keys (d = {d}, H = {heads}, k = {k}, float32)",
        "相对键所占的内存（d = {d}，H = {heads}，k = {k}，float32）",
    ),
    "length (tokens)": ("length (tokens)", "长度（词元）"),
    "bucket right": ("correct: 0 to {most}", "正确：0 到 {most}"),
    "bucket wrong": ("mistaken: ids reach {most} and collide", "错误：编号达到 {most}，并且冲突"),
    "table rows": ("rows of the table: {rows}", "表的行数：{rows}"),
    "bucket id": ("bucket id", "桶编号"),
    "mistake title": (
        "Bucket ids, correct and mistaken ({buckets} buckets, max_distance 128, bidirectional)",
        "桶编号，正确与错误（{buckets} 个桶，max_distance 128，双向）",
    ),
    "distance |j − i|": ("distance |j − i|", "距离 |j − i|"),
    "decay title": ("Score of q = k = (1, 1, …) over distance", "q = k = (1, 1, …) 的得分随距离的变化"),
    "bound title": ("Mean size of the partial sums: the decay of the paper", "部分和的平均大小：论文所说的衰减"),
    "mean |S|": ("mean |S|", "平均 |S|"),
    "size": ("size", "大小"),
    "pair number": ("pair {pair}", "第 {pair} 对"),
    "rotation title": ("First channel of each pair, all starting at 1", "每对的第一个通道，都从 1 开始"),
    "factor": ("factor {factor}", "因子 {factor}"),
    "trained length": ("trained length", "训练长度"),
    "dynamic title": (
        "Base of dynamic NTK over the length, trained at {length}",
        "动态 NTK 的基数随长度的变化，训练长度 {length}",
    ),
    "base axis": ("base", "基数"),
    "linear": ("linear", "线性"),
    "divisor title": ("Divisor of each pair's frequency, factor {factor}", "每对频率的除数，因子 {factor}"),
    "divisor": ("divisor", "除数"),
    "pair axis": ("pair (fast to slow)", "通道对（由快到慢）"),
    "ramp code": ("code: linear in the pair", "代码：按通道对线性"),
    "ramp paper": ("paper: linear in rotations", "论文：按转数线性"),
    "ramp title": (
        "Share of each frequency that YaRN keeps, factor {factor}",
        "YaRN 保留的每个频率的比例，因子 {factor}",
    ),
    "trained here": ("trained", "训练长度"),
    "lab title": (
        "Loss on text past the training length (preset quick)",
        "超过训练长度时文本上的损失（预设 quick）",
    ),
    "length (bytes)": ("length (bytes)", "长度（字节）"),
    "nats per byte": ("nats per byte", "nat/字节"),
}

ENGLISH = Translation({**translations.ENGLISH.table, **{key: pair[0] for key, pair in TEXTS.items()}})
