"""Short texts of generated pages, in both languages."""

from __future__ import annotations

ENGINES = {
    "en": {
        "triton": ("CUDA", "one forward kernel and a backward pair for every slot but `pair`; table gradients without atomics"),
        "sdpa": ("anything", "PyTorch's attention as it is, for plans that add nothing to scores or values (rope, absolute encodings)"),
        "cpu": ("CPU", "PyTorch's fused attention in blocks, the position terms as views of O(L) tables; own backward"),
        "blocked": ("anything", "the formula over a block of queries at a time, for every plan that the others do not support"),
        "reference": ("anything, by name only", "dense, the formula as written, float32 or better: what the others are tested against"),
    },
    "zh": {
        "triton": ("CUDA", "一个前向核和一对反向核，支持除 `pair` 外的所有项；表的梯度不用原子操作"),
        "sdpa": ("任何设备", "直接调用 PyTorch 的注意力，用于对分数和值都不附加任何项的 `Plan`（rope、绝对位置编码）"),
        "cpu": ("CPU", "分块调用 PyTorch 自带的融合注意力，位置项是 O(L) 表的视图；自带反向传播"),
        "blocked": ("任何设备", "每次对一块查询按公式计算，执行其他引擎不支持的所有 `Plan`"),
        "reference": ("任何设备，仅在指名时", "稠密，照公式原样计算，float32 或更高精度：其余引擎都与它对照测试"),
    },
}  # fmt: skip

FACTS = {
    "none": dict(enters="不进入", extrapolates="不能：在 2 倍处失效（实验室）；次序只来自因果掩码"),
    "sinusoidal": dict(enters="输入", extrapolates="不能：处处有定义，但没见过的位置会误导模型"),
    "sinusoidal_2d": dict(enters="输入，按行、列", extrapolates="不能：处处有定义，但没见过的行和列会误导模型"),
    "learned": dict(enters="输入", extrapolates="不能：超过 max_length 无定义"),
    "shaw": dict(enters="分数和值", extrapolates="有限：超过 max_distance 的距离共用一行"),
    "clipped": dict(enters="分数", extrapolates="有限：超过 max_distance 的距离共用一个数"),
    "t5": dict(enters="分数", extrapolates="到训练长度的 2 倍；训练得久则到 16 倍（实验室）"),
    "transformer_xl": dict(enters="分数", extrapolates="可以，配合记忆和 clamp_length"),
    "xlnet": dict(enters="分数", extrapolates="可以，配合记忆和 clamp_length"),
    "deberta": dict(enters="分数", extrapolates="可以：超过最后一个桶的距离共用一行"),
    "rope": dict(enters="查询和键", extrapolates="不能；加上缩放（线性、NTK、动态 NTK 等）则可以"),
    "mrope": dict(enters="查询和键，按时间、行、列", extrapolates="不能；加上缩放（YaRN 等）则可以"),
    "axial": dict(
        enters="查询和键，按行、列", extrapolates="不能：没见过的行和列会误导模型；DINOv3 的坐标相对于图像大小"
    ),
    "xpos": dict(enters="查询和键", extrapolates="可以，配合分块注意力；仅限因果"),
    "relative_logits": dict(enters="分数", extrapolates="可以：超过 max_distance 则什么也不加"),
    "alibi": dict(enters="分数", extrapolates="可以：远超训练长度仍然平稳"),
    "sinks": dict(enters="分数", extrapolates="取决于与它并用的编码"),
    "tempered": dict(enters="分数", extrapolates="为此而设，配合能外推的编码"),
    "grid_bias": dict(enters="分数", extrapolates="不能：只适合一种窗口；resize 可插值"),
    "continuous_bias": dict(enters="分数", extrapolates="可以：同一个网络用于其他窗口"),
    "decomposed": dict(enters="分数", extrapolates="其他尺寸时对表插值"),
    "mixed_rope": dict(enters="查询和键", extrapolates="部分可以：角度继续增大，没见过的会误导模型"),
    "many_axes": dict(enters="查询和键", extrapolates="每个轴同 rope"),
    "fox": dict(enters="分数", extrapolates="可以：按词元决定的速度忘记远处的键"),
    "kerple": dict(enters="分数", extrapolates="可以：按对数或幂继续衰减"),
    "sandwich": dict(enters="分数", extrapolates="可以：大致按对数继续衰减"),
    "tupe": dict(enters="分数", extrapolates="不能：超过 max_length 无定义"),
    "cape": dict(enters="输入", extrapolates="部分可以：训练中的平移和伸缩扩大了范围"),
    "pope": dict(enters="查询和键", extrapolates="据作者称优于 rope"),
    "fire": dict(enters="分数", extrapolates="到训练长度的 2 倍；在 32 倍处失效（实验室，三个种子）"),
    "latent": dict(enters="查询和键", extrapolates="与它的旋转相同"),
    "cope": dict(enters="分数", extrapolates="计数止于表的最后一行"),
    "stick_breaking": dict(enters="代替 softmax", extrapolates="可以：近处的键先取走自己的份额"),
    "path": dict(enters="分数", extrapolates="部分可以；加上遗忘门（PaTH-FoX）则可以"),
}
"""Chinese for the registry's facts; an encoding without an entry shows the English."""
