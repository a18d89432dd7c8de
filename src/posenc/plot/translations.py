"""Texts of the figures, in English and Simplified Chinese: a Translation maps keys to sentences and fills in values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Translation:
    """words(key, **values) -> a sentence of one language. Unknown keys are returned unchanged, so that names pass through."""

    table: Mapping[str, str]

    def __call__(self, key: str, **values: object) -> str:
        return self.table.get(key, key).format(**values)


ENGLISH = Translation(
    {
        "position": "position (tokens)",
        "distance": "distance r = j − i (tokens; negative: past)",
        "dimension": "dimension",
        "cos, sin of pair": "channel (cosines of the pairs, then sines)",
        "head": "head",
        "all heads": "all heads",
        "pair": "pair of channels",
        "value": "value",
        "cosine": "cosine similarity",
        "score": "score (logits)",
        "row": "table row",
        "key j": "key position j (tokens)",
        "query i": "query position i (tokens)",
        "wavelength": "wavelength (tokens per rotation)",
        "encoding position": "{name}: the vector of each position",
        "encoding centred": "{name}: the vector of a key at each position; its factor is 1 in the middle",
        "encoding distance": "{name}: the table row of each distance",
        "dimensions": "{name}: single channels, from the first to the last",
        "similarity position": "{name}: cosine similarity of two positions (1: same direction)",
        "similarity distance": "{name}: cosine similarity of the rows of two distances (1: same direction)",
        "product of query and key": "{name}: product of query i and key j, 1 where i = j; it decays into the past",
        "product": "product",
        "trained table": "{name} (trained)",
        "untrained table": "{name} (untrained)",
        "kernel": "{name}, head {head}: {pattern}",
        "flat": "position adds nothing to any score",
        "stripes": "constant along each diagonal, so only j − i matters",
        "no stripes": "varies along diagonals, so absolute positions matter",
        "over distance": "{name}: contribution of position to the score; {pattern}",
        "heads agree": "the same for every head",
        "heads differ": "different for each head",
        "buckets": "{name}: table row of each distance; constant up to {low} and from {high}",
        "wavelengths": "{slow} of {pairs} pairs do not complete a rotation within the {original} trained tokens",
        "trained": "trained on {length} tokens",
        "target length": "target: {length} tokens",
        "total": "score = the sum of:",
        "absent": "{term} (absent)",
    }
)

CHINESE = Translation(
    {
        "position": "位置（词元）",
        "distance": "距离 r = j − i（词元；负数为过去）",
        "dimension": "维度",
        "cos, sin of pair": "通道（先是各对的余弦，再是正弦）",
        "head": "头",
        "all heads": "所有头",
        "pair": "通道对",
        "value": "数值",
        "cosine": "余弦相似度",
        "score": "得分（logit）",
        "row": "表的行",
        "key j": "键（key）位置 j",
        "query i": "查询（query）位置 i",
        "wavelength": "波长（转一圈的词元数）",
        "encoding position": "{name}：每个位置的向量",
        "encoding centred": "{name}：键（key）在每个位置的向量；其系数在正中为 1",
        "encoding distance": "{name}：每个距离对应的表行",
        "dimensions": "{name}：若干单个通道，从第一个到最后一个",
        "similarity position": "{name}：两个位置的余弦相似度（1：方向相同）",
        "similarity distance": "{name}：两个距离的表行的余弦相似度（1：方向相同）",
        "product of query and key": "{name}：查询 i 与键 j 的乘积，i = j 时为 1；向过去衰减",
        "product": "乘积",
        "trained table": "{name}（已训练）",
        "untrained table": "{name}（未训练）",
        "kernel": "{name}，头 {head}：{pattern}",
        "flat": "位置不改变任何得分",
        "stripes": "沿对角线不变，只与 j − i 有关",
        "no stripes": "沿对角线变化，与绝对位置有关",
        "over distance": "{name}：位置给得分加了多少；{pattern}",
        "heads agree": "所有头相同",
        "heads differ": "各头不同",
        "buckets": "{name}：每个距离对应的表行；{low} 及以前、{high} 及以后为常数",
        "wavelengths": "{pairs} 个通道对中有 {slow} 个在训练的 {original} 个词元内转不满一圈",
        "trained": "训练长度 {length}",
        "target length": "目标长度 {length}",
        "total": "得分 = 以下各项之和：",
        "absent": "{term}（没有）",
        "content·content": "内容·内容",
        "content·position": "内容·位置",
        "position·content": "位置·内容",
        "position·position": "位置·位置",
        "rotation": "旋转",
    }
)
