"""The gallery's description of each encoding in both languages; encodings without one use their EncodingInfo."""

from __future__ import annotations

from typing import NamedTuple

from ...encodings.registry import find_card


class About(NamedTuple):
    family: str
    enters: str
    parameters: str
    extrapolates: str
    when: str


FAMILIES = {
    "none": "无", "absolute": "绝对位置", "rotary": "旋转", "relative, bias": "相对位置，偏置",
    "relative, content": "相对位置，与内容相关", "attention sink": "注意力汇", "temperature": "温度", "data-dependent decay": "由数据决定的衰减",
    "contextual": "由上下文决定", "contextual, multiplicative": "由上下文决定，矩阵之积", "latent attention, rotary": "潜在注意力，旋转",
}  # fmt: skip
ENTERS = {
    "nowhere": "不进入", "input": "输入", "queries and keys": "查询和键", "scores": "注意力得分",
    "scores and values": "注意力得分和值", "in place of the softmax": "代替 softmax",
}  # fmt: skip
WHEN = {
    "none": "As a baseline, or in some layers of a causal model between rotary ones; never for bidirectional text alone.",
    "sinusoidal": "For a fixed range of lengths when you want no parameters and no change inside attention.",
    "learned": "For a fixed maximum length, such as image patches or short text, when the checkpoint already has it.",
    "shaw": "For short-range structure such as speech, music or translation, where distances interact with content.",
    "clipped": "For a small model or a small window: the cheapest learned relative position.",
    "t5": "For encoders and encoder-decoders, and when one table should serve all layers and lengths.",
    "transformer_xl": "For segment recurrence and speech encoders, where exact distances far back matter.",
    "xlnet": "To load XLNet, or when attention must distinguish two text segments.",
    "deberta": "For text encoders: position and content interact in both directions.",
    "rope": "The default for decoders: no parameters, it changes only q and k, and there are many ways to extend it.",
    "mrope": "For images and video among text: time, row and column each rotate their own share of the pairs.",
    "axial": "For images: the row and the column of a patch each rotate half of the pairs.",
    "sinusoidal_2d": "For images, when nothing inside attention should change: sines of row and column, added once.",
    "xpos": "For decoders whose attention should decay smoothly: rotation with a decay over distance.",
    "relative_logits": "For decoders without rotation in which each query weights distances by itself.",
    "alibi": "To train short and test long, when nearby tokens matter most.",
    "sinks": "When heads should be able to attend to nothing, above all with sliding windows; together with any other encoding.",
    "tempered": "For long contexts: scores of far queries are multiplied, so that the softmax over more keys stays sharp.",
    "grid_bias": "For images in windows of a fixed size: the cheapest relative position over rows and columns.",
    "continuous_bias": "For images whose window grows after training: the bias is a function of coordinates.",
    "decomposed": "For large images: content-dependent positions at the cost of two short tables.",
    "mixed_rope": "For image models that are trained from scratch: each pair learns a direction, diagonals included.",
    "many_axes": "For any other rotary convention over several axes: name the axis and the frequency of each pair.",
    "fox": "For decoders that read long texts: each token decides how much of the past fades, and no other position is needed.",
    "kerple": "To train short and test long with decays that each head learns.",
    "sandwich": "To train short and test long without parameters, with a decay between ALiBi's and T5's.",
    "fire": "Where texts of different lengths meet in one model: a learned bias whose input stays in the trained range.",
    "tupe": "For text encoders: words and positions are compared separately, and the class token is free of position.",
    "cape": "For absolute positions that should generalise: training sees them shifted and stretched.",
    "pope": "For decoders in which what a token is and where it stands should not mix.",
    "latent": "For decoders whose cache must be small: all heads share one latent and one rotated part for each token.",
    "cope": "Where a position should count something other than tokens: words, sentences, list entries.",
    "stick_breaking": "For decoders without any other position: recent keys take their share of the attention first.",
    "path": "For decoders that track state: positions are products of matrices that the tokens choose.",
}
CHINESE = {
    "none": About("", "", "无", "否：在 2 倍处失效（实验室）；仅因果掩码能提供一些顺序信息", "作为基线，或与旋转层交替用于因果模型；不要单独用于双向文本。"),
    "sinusoidal": About("", "", "无", "否：任何位置都有定义，但没见过的位置会误导模型", "长度范围固定，且不想增加参数、不改动注意力内部时。"),
    "learned": About("", "", "max_length × d_model", "否：超过 max_length 没有定义", "最大长度固定（图像块、短文本），或检查点已经使用它时。"),
    "shaw": About("", "", "(2 max_distance + 1) × d_head，每张表", "有限：超过 max_distance 的距离共用一行", "语音、音乐、翻译等短程结构，距离需要与内容相互作用时。"),
    "clipped": About("", "", "heads × (2 max_distance + 1)", "有限：超过 max_distance 的距离共用一个值", "小模型或小窗口：最便宜的可学习相对位置。"),
    "t5": About("", "", "buckets × heads", "到训练长度的 2 倍；训练得久则到 16 倍（实验室）", "编码器和编码器–解码器，或希望一张表服务所有层和所有长度时。"),
    "transformer_xl": About("", "", "d_model × d_model + 2 × heads × d_head", "是，借助记忆和 clamp_length", "分段循环和语音编码器，需要很远处的精确距离时。"),
    "xlnet": About("", "", "d_model × d_model + 5 × heads × d_head", "是，借助记忆和 clamp_length", "加载 XLNet，或需要在注意力内部区分两个文本段时。"),
    "deberta": About("", "", "2k × d_model + 投影", "是：超过最后一个桶的距离共用一行", "需要理解句子的编码器：位置与内容双向相互作用。"),
    "rope": About("", "", "无", "否；配合缩放（线性、NTK、动态 NTK 等）可以", "解码器的默认选择：没有参数，只改变 q 和 k，且有多种扩展方法。"),
    "mrope": About("", "", "无", "同 RoPE", "文本中夹有图像和视频时：时间、行、列各自旋转一部分通道对。"),
    "axial": About("", "", "无", "否：没见过的行和列会误导模型；DINOv3 的坐标相对于图像大小", "图像：图像块的行和列各自旋转一半的通道对。"),
    "sinusoidal_2d": About("", "", "无", "否：处处有定义，但没见过的行和列会误导模型", "图像，且不想改动注意力内部时：行和列的正弦，只加一次。"),
    "xpos": About("", "", "无", "是，配合分块注意力；仅限因果", "希望平滑遗忘的解码器：旋转加上随距离的衰减。"),
    "relative_logits": About("", "", "d_model × heads × d_rel + d_rel × max_distance", "是：超出 max_distance 不再加任何值", "不用旋转的解码器，由每个词元决定距离如何起作用。"),
    "alibi": About("", "", "无，或 heads 个斜率", "是：远超训练长度仍保持平稳", "短训练、长测试，且附近的词元最重要时。"),
    "sinks": About("", "", "heads", "与所搭配的编码相同", "希望注意力头可以什么都不关注时，尤其是滑动窗口；与任何其他编码搭配使用。"),
    "tempered": About("", "", "无", "为此而设，需配合可外推的编码", "长上下文：位置靠后的查询得分被放大，使更多键上的 softmax 仍然集中。"),
    "grid_bias": About("", "", "(2 行 - 1)(2 列 - 1) × heads", "否：只有一种窗口；resize 可插值", "固定大小窗口的图像：行列上最便宜的相对位置。"),
    "continuous_bias": About("", "", "3 × hidden + hidden × heads + heads", "是：其他窗口用同一个网络", "训练后窗口会变大的图像：偏置是坐标的函数。"),
    "decomposed": About("", "", "(2 行 + 2 列 - 2) × d_head", "其他尺寸用插值的表", "大图像：与内容相关的位置，只需两张短表。"),
    "mixed_rope": About("", "", "axes × heads × d_head / 2", "部分：角度继续增长，没见过的角度会误导模型", "从头训练的图像模型：每个通道对学习一个方向，包括对角线。"),
    "many_axes": About("", "", "无", "每个轴同 RoPE", "其他任何多轴旋转约定：给出每个通道对的轴和频率。"),
    "fox": About("", "", "(d_model + 1) × heads", "是：远处的键按词元决定的速度被遗忘", "阅读长文本的解码器：每个词元决定过去衰减多少，无需其他位置。"),
    "kerple": About("", "", "2 × heads", "是：衰减继续，对数或幂次", "短训练、长测试，且每个头学习自己的衰减时。"),
    "sandwich": About("", "", "无", "是：衰减继续，大致为对数", "短训练、长测试且不要参数时，衰减介于 ALiBi 与 T5 之间。"),
    "fire": About("", "", "2 × hidden + (hidden + 1) × heads + 2", "到训练长度的 2 倍；在 32 倍处失效（实验室，三个种子）", "同一个模型要处理长短不同的文本时：学习的偏置，其输入总在训练范围内。"),
    "tupe": About("", "", "(max_length + 1) × d_model + 2 d_model²", "否：超过 max_length 没有定义", "文本编码器：词与位置分别比较，类别词元不受位置影响。"),
    "cape": About("", "", "无", "部分：训练中的平移和缩放扩大了范围", "希望绝对位置能泛化时：训练中位置被随机平移和缩放。"),
    "pope": About("", "", "heads × d_head", "据作者优于 RoPE", "希望词元的内容与位置互不混合的解码器。"),
    "latent": About("", "", "低秩投影", "与它的旋转相同", "缓存必须小的解码器：所有头共用每个词元的一个潜在向量和一个旋转部分。"),
    "cope": About("", "", "n × d_head", "计数止于表的最后一行", "位置应当数词元以外的东西时：词、句子、列表项。"),
    "stick_breaking": About("", "", "无", "是：近处的键先取走自己的份额", "不用其他位置的解码器：近处的键先取走注意力。"),
    "path": About("", "", "模型对 w 和 β 的投影", "部分；配合遗忘门（PaTH-FoX）可以", "需要跟踪状态的解码器：位置是由词元选择的矩阵之积。"),
}  # fmt: skip


def describe(name: str, language: str) -> About:
    """The description of an encoding in a language ("en", "zh")."""
    which = find_card(name)
    if language == "zh" and name in CHINESE:
        family, enters = FAMILIES.get(which.family, which.family), ENTERS.get(which.enters, which.enters)
        return CHINESE[name]._replace(family=family, enters=enters)
    when = WHEN.get(name, f"When you load a model that has it: {which.used_by}.")
    return About(which.family, which.enters, which.parameters, which.extrapolates, when)
