"""The chapters of the course as the learn page shows them: figures with one number to change, texts, and code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...plot import course
from ...plot.panels import Panel


@dataclass(frozen=True)
class Chapter:
    """`figures` draw for one number from `low` to `high`; every text is (English, Chinese)."""

    page: str  # of the course, without its ending
    title: tuple[str, str]
    caption: tuple[str, str]  # what the figures show
    change: tuple[str, str]  # what to change, and what to watch
    number: tuple[str, str]  # what the number is
    low: float
    high: float
    step: float
    start: float
    figures: Sequence[Callable[..., list[Panel]]]
    code: str  # computes `drawn`, a curve or matrix of the figures; {0} is the number


CHAPTERS = (
    Chapter(
        "01-order",
        ("Order is lost", "次序会丢失"),
        (
            "Two tokens of a text swap places. Without positions no other token's output changes; a causal mask or an encoding makes the order visible.",
            "文本中的两个词元交换位置。没有位置时，其他词元的输出都不变；因果掩码或位置编码使顺序可见。",
        ),
        (
            "Move the second token: with a causal mask only the tokens between the two change.",
            "移动第二个词元：有因果掩码时，只有两者之间的词元才变化。",
        ),
        ("Token that swaps with token 2", "与词元 2 交换的词元"),
        3, 11, 1, 5, (course.order_lost,),
        """import torch, posenc
torch.manual_seed(0)
x = torch.randn(1, 12, 64)
y = x.clone()
y[:, [2, {0}]] = x[:, [{0}, 2]]
torch.manual_seed(1)
layer = posenc.Attention(64, 4, encoding="none")
drawn = (layer(y) - layer(x)).abs().amax(-1)[0].detach()
drawn[[2, {0}]] = float("nan")""",
    ),
    Chapter(
        "02-sinusoidal",
        ("Sinusoidal positions", "正弦位置编码"),
        (
            "Each pair of channels is a clock of its own speed; the dot product of two positions depends on their distance alone.",
            "每对通道是一只速度不同的钟；两个位置的点积只取决于它们的距离。",
        ),
        (
            "Lower the base: the slow channels become fast, and the dot product oscillates. Raise it: most channels hardly move in 100 positions.",
            "减小基数：慢的通道变快，点积开始振荡。增大基数：大多数通道在 100 个位置内几乎不动。",
        ),
        ("n of the base 10ⁿ", "基数 10ⁿ 的 n"),
        1, 6, 0.5, 4, (course.sinusoid_table, course.sinusoid_similarity),
        """import torch, posenc
pe = posenc.Sinusoidal(d_model=64, base=10.0**{0})
drawn = pe.embed(torch.zeros(1, 100, 64), posenc.Positions(100))[0]""",
    ),
    Chapter(
        "03-learned",
        ("Learned positions", "可学习的位置"),
        (
            "A table has one vector for each position and nothing beyond its last row; resize interpolates it for another length.",
            "表中每个位置一个向量，最后一行之后什么也没有；resize 为另一个长度做插值。",
        ),
        (
            "Change the number of rows: the curve keeps its shape and is stretched, so every position gets a new meaning.",
            "改变行数：曲线形状不变，只是被拉伸，因此每个位置都有了新的含义。",
        ),
        ("Rows after resize", "resize 后的行数"),
        16, 256, 16, 128, (course.learned_resize,),
        """import torch, posenc
table = posenc.Learned(max_length=64, d_model=8)
with torch.no_grad():
    table.table.copy_(posenc.Sinusoidal(d_model=8, base=50.0).embed(torch.zeros(1, 64, 8), posenc.Positions(64))[0])
drawn = table.resize({0}).table[:, 2].detach()""",
    ),
    Chapter(
        "04-shaw",
        ("Relative positions", "相对位置"),
        (
            "A distance selects a row of a table; distances beyond k share the last one. Computing q·a per distance saves the memory of one vector for each pair.",
            "距离选出表的一行；超过 k 的距离共用最后一行。对每个距离计算 q·a，省去了每一对一个向量的内存。",
        ),
        (
            "Change k: the stairs grow, and so does the second curve of the memory, but never like L².",
            "改变 k：台阶变多，内存图的第二条曲线也上升，但绝不像 L² 那样增长。",
        ),
        ("k (max_distance)", "k（max_distance）"),
        1, 16, 1, 4, (course.shaw_clip, course.shaw_memory),
        """import torch, posenc
reach = max(10, 2 * {0})
drawn = posenc.index.clip({0}, {0}).lookup(torch.arange(-reach, reach + 1))""",
    ),
    Chapter(
        "05-four-terms",
        ("Four terms", "四项展开"),
        (
            "The score is the sum of four terms: content with content, content with position, position with content, position with position.",
            "得分是四项之和：内容与内容、内容与位置、位置与内容、位置与位置。",
        ),
        (
            "Raise the size of the learned vectors from 0: the position terms appear beside the content's.",
            "把可学习向量的大小从 0 调大：位置项在内容项旁边出现。",
        ),
        ("Standard deviation of the learned vectors", "可学习向量的标准差"),
        0, 1, 0.1, 0.3, (course.four_terms,),
        """import torch, posenc
torch.manual_seed(0)
layer = posenc.Attention(64, 4, encoding=posenc.TransformerXL(d_model=64, heads=4, std={0}))
x = torch.randn(1, 16, 64)
terms = posenc.plot.analysis.decomposition(layer, x, posenc.Positions(16))
drawn = sum(terms.values())[0].detach()""",
    ),
    Chapter(
        "06-t5",
        ("One number per distance", "每个距离一个数"),
        (
            "Near distances have a bucket each, far ones share: the width grows logarithmically up to max_distance. The mistaken code gives ids that no row of the table has.",
            "近的距离各占一个桶，远的共用：宽度按对数增长，直到 max_distance。错误的代码会给出表中没有的编号。",
        ),
        (
            "Change the number of buckets: half of them are for each direction, and half of those are exact.",
            "改变桶数：每个方向占一半，其中又有一半是精确的。",
        ),
        ("Buckets", "桶数"),
        8, 64, 4, 32, (course.t5_buckets, course.t5_mistake),
        """import posenc
r = range(-130, 131)
drawn = [posenc.formulas.t5_bucket(d, buckets={0}, max_distance=128, causal=False) for d in r]""",
    ),
    Chapter(
        "07-deberta",
        ("Disentangled attention", "解耦注意力"),
        (
            "Version 1 clips the distance; versions 2 and 3 have logarithmic buckets beyond half of them. Both tables serve queries and keys.",
            "第 1 版截断距离；第 2、3 版在一半桶数之外使用对数分桶。两种表都同时用于查询和键。",
        ),
        (
            "Change the buckets of version 3: the exact part is half of them, on each side.",
            "改变第 3 版的桶数：每一侧精确的部分是其一半。",
        ),
        ("Buckets of version 3", "第 3 版的桶数"),
        8, 64, 4, 32, (course.deberta_buckets,),
        """import torch, posenc
drawn = posenc.index.deberta_buckets({0}, 128).lookup(torch.arange(-150, 151))""",
    ),
    Chapter(
        "08-rope",
        ("Rotary positions", "旋转位置编码"),
        (
            "Each pair of channels of q and k rotates by an angle that grows with the position; the score then depends on the distance, and decays for equal vectors.",
            "q 和 k 的每对通道按随位置增大的角度旋转；于是得分只与距离有关，并且对相同的向量会衰减。",
        ),
        (
            "Raise the base: pairs rotate more slowly and the decay is slower. Models with long contexts have bases of 10⁶ and more.",
            "增大基数：各对旋转得更慢，衰减也更慢。长上下文模型的基数达到 10⁶ 甚至更大。",
        ),
        ("n of the base 10ⁿ", "基数 10ⁿ 的 n"),
        1, 7, 0.5, 4, (course.rope_decay, course.rope_rotation),
        """import math, posenc
w = posenc.formulas.inverse_frequencies(128, 10.0**{0})
drawn = [sum(2 * math.cos(r * each) for each in w) for r in range(257)]""",
    ),
    Chapter(
        "09-interpolation",
        ("Longer contexts I", "更长的上下文（上）"),
        (
            "To read longer texts, pairs must rotate more slowly: interpolation slows all by the same factor, NTK-aware scaling the slow ones more.",
            "要读更长的文本，各对必须转得更慢：插值使所有对慢同样的倍数，NTK 缩放使慢的对慢得更多。",
        ),
        (
            "Change the factor: the pairs above the trained length are those whose full rotation was never trained.",
            "改变因子：在训练长度之上的通道对，训练中从未转满一圈。",
        ),
        ("Factor", "因子"),
        1, 32, 1, 4, (course.scaling_wavelengths, course.dynamic_base),
        """import math, posenc
linear = posenc.scaling.Linear(factor=float({0}))
drawn = [math.tau / w for w in posenc.scaling.frequencies(128, 10000.0, linear)]""",
    ),
    Chapter(
        "10-yarn",
        ("Longer contexts II", "更长的上下文（下）"),
        (
            "YaRN leaves fast pairs alone, interpolates slow ones, and blends between them by a ramp; Llama 3 does the same by wavelength.",
            "YaRN 不动快的对，对慢的对插值，中间按斜坡过渡；Llama 3 按波长做同样的事。",
        ),
        (
            "Raise the factor: the fast pairs stay at divisor 1, the slow ones follow.",
            "增大因子：快的对除数始终是 1，慢的对随之变化。",
        ),
        ("Factor", "因子"),
        2, 32, 1, 4, (course.scaling_divisors, course.yarn_ramp),
        """import posenc
plain = posenc.scaling.frequencies(128, 10000.0)
yarn = posenc.scaling.frequencies(128, 10000.0, posenc.scaling.YaRN(factor=float({0}), original=4096))
drawn = [a / b for a, b in zip(plain, yarn)]""",
    ),
    Chapter(
        "11-alibi",
        ("Penalties for distance", "按距离扣分"),
        (
            "Each head subtracts its slope times the distance: steep heads attend to the last tokens, flat ones far back.",
            "每个头减去斜率乘以距离：斜率大的头只看最近的词元，斜率小的头看得远。",
        ),
        (
            "Change the number of heads: the flattest slope is always 1/256, more heads add steeper and finer ones; for 6 heads they come from those of 4 and of 8.",
            "改变头数：最小的斜率总是 1/256，头越多，斜率越陡、越细；6 个头时取自 4 个头和 8 个头的斜率。",
        ),
        ("Heads", "头数"),
        2, 32, 2, 8, (course.alibi_slopes,),
        """import posenc
slope = posenc.formulas.alibi_slopes({0})[0]
drawn = [-slope * abs(r) for r in range(-64, 65)]""",
    ),
    Chapter(
        "12-extrapolation",
        ("Extrapolation", "外推"),
        (
            "Small models of the lab, trained on 64 bytes and tested on longer texts: a flat curve holds, a rising one breaks.",
            "实验室的小模型，以 64 字节训练，在更长的文本上测试：曲线平就保持，上升就失效。",
        ),
        (
            "Shorten the longest test: at twice the training length most encodings still look good.",
            "缩短最长的测试：在训练长度的两倍处，大多数编码看起来仍然不错。",
        ),
        ("Longest test (bytes)", "最长的测试（字节）"),
        128, 512, 128, 512, (course.lab_quick,),
        """from posenc.plot import course
run = course.published()
drawn = [loss for size, loss in zip(run["test"], run["loss"]["alibi"]) if size <= {0}]""",
    ),
)  # fmt: skip
