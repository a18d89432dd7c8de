"""Every text of the explorer, in English and in Simplified Chinese, by key."""

from __future__ import annotations

from ..plot import course_texts
from ..plot.translations import CHINESE, ENGLISH, Translation

TEXTS: dict[str, tuple[str, str]] = {
    # the page
    "language": ("en", "zh"),
    "title": ("posenc explorer", "posenc 位置编码浏览器"),
    "subtitle": (
        "See what positional encodings do to attention.",
        "观察位置编码如何影响注意力。",
    ),
    "gallery": ("Gallery", "编码一览"),
    "learn": ("Learn", "学习"),
    "compare": ("Compare", "比较"),
    "sentence": ("Your sentence", "你的句子"),
    "extend": ("Extend RoPE", "扩展 RoPE"),
    "results": ("Results", "结果"),
    "gallery intro": (
        "One encoding at a time: formula, figures, who uses it, when to choose it.",
        "逐个查看每种编码：公式、图形、使用者、适用场合。",
    ),
    "learn intro": (
        "The course in figures: choose a chapter, then change its number.",
        "用图学习教程：选择一章，再改变其中的数。",
    ),
    "compare intro": (
        "Two or three encodings at one length. The content is the same at every position, so every difference comes from position.",
        "在同一长度下比较两三种编码。各位置的内容相同，因此差别全部来自位置。",
    ),
    "sentence intro": (
        "An untrained layer in which a token attends to equal tokens; the encodings differ in position only.",
        "一个未训练的层，每个词元关注与自己相同的词元；各编码之间的差别只在位置。",
    ),
    "extend intro": (
        "Extend the context of a rotary model: what each scaling does to its wavelengths, and the JSON for its config.json.",
        "扩展旋转编码模型的上下文：每种缩放对波长的影响，以及写入 config.json 的 JSON。",
    ),
    "results intro": (
        "A run of the lab: what to use, how sure that is, and the whole report.",
        "一次实验：该用哪种编码、有多大把握，以及完整报告。",
    ),
    "figure": ("Figure {number}: {titles}", "图 {number}：{titles}"),
    "figure label": ("Figure {number}", "图 {number}"),
    "comma": (", ", "、"),
    "drawn": ("Drawn.", "已绘制。"),
    "refining": ("Drawn coarsely; the finer figure follows.", "已粗略绘制，精细的图随后出现。"),
    "drawing": ("Drawing", "正在绘制"),
    "no response": (
        "The explorer does not respond; is posenc explore still running?",
        "服务没有响应；posenc explore 还在运行吗？",
    ),
    "bad request": ("The page is older than the server; load it again.", "页面比服务器旧；请重新加载。"),
    "library": (
        "{error}",
        "无法这样设置（原文为英文）：{error}",
    ),
    "link long": (
        "The link is {length:,} characters long; at most {most:,} are allowed.",
        "链接有 {length:,} 个字符；最多允许 {most:,} 个。",
    ),
    "unknown parameters": (
        "The link has parameters that this page does not know: {unknown}.",
        "链接中有此页面没有的参数：{unknown}。",
    ),
    "unknown page": ("There is no page “{name}”; this is the first one.", "没有名为“{name}”的页面；这是第一页。"),
    "no number": ("{name}: give a number from {low} to {high}.", "{name}：请给出 {low} 到 {high} 之间的数。"),
    "not a number": (
        "{name}: “{given}” is not a number; give {low} to {high}.",
        "{name}：“{given}”不是数字；请给出 {low} 到 {high}。",
    ),
    "not whole": (
        "{name}: {given} must be a whole number from {low} to {high}.",
        "{name}：{given} 必须是 {low} 到 {high} 之间的整数。",
    ),
    "not between": (
        "{name}: {given} must lie between {low} and {high}.",
        "{name}：{given} 必须在 {low} 和 {high} 之间。",
    ),
    "no such choice": ("{name}: “{given}” is unknown; choose {choices}.", "{name}：没有“{given}”；可选 {choices}。"),
    "odd head": (
        "The head size must be even, got {head_dim}: RoPE rotates pairs of channels.",
        "头的维度必须是偶数，当前为 {head_dim}：RoPE 旋转成对的通道。",
    ),
    "too large": (
        "Drawing this needs more memory than the explorer may use; choose a shorter length or smaller options.",
        "绘制需要的内存超过了允许的上限；请选择更短的长度或更小的选项。",
    ),
    "too slow": (
        "Drawing this takes longer than the time limit of one view; choose a shorter length or smaller options.",
        "绘制所需的时间超过了一个视图允许的上限；请选择更短的长度或更小的选项。",
    ),
    "busy": (
        "The explorer is busy with other views; try again in a moment.",
        "正在绘制其他视图；请稍后再试。",
    ),
    "option high": (
        "{encoding}: {option}={given} is outside the range that can be drawn; give a number from {low:g} to {high:g}.",
        "{encoding}：{option}={given} 超出了图中能显示的范围；请给出 {low:g} 到 {high:g} 之间的数。",
    ),
    "option size": (
        "{encoding}: {option} is a size of the layer, which is the same in every figure; leave it out.",
        "{encoding}：{option} 是层的尺寸，所有图形都相同；请去掉它。",
    ),
    "option kind": (
        "{encoding}: {option}={given} must be a number, true, false or a word.",
        "{encoding}：{option}={given} 必须是数字、true、false 或一个词。",
    ),
    "failed": ("This cannot be drawn: {error}", "无法绘制：{error}"),
    "code": ("Show the code", "显示代码"),
    "code label": (
        "posenc code that computes the same values",
        "计算相同数值的 posenc 代码",
    ),
    "tools": ("Share and export", "分享和导出"),
    "link": ("Link to this view", "此视图的链接"),
    "copy": ("Copy the link", "复制链接"),
    "copy code": ("Copy the code", "复制代码"),
    "copied": ("Copied", "已复制"),
    "csv": (
        "Download CSV",
        "下载 CSV",
    ),
    "no such table": (
        "There is no table {number}; the tables of this view are 1 to {last}.",
        "没有表 {number}；此视图的表为 1 到 {last}。",
    ),
    "csv table": (
        "{number}. {title}",
        "{number}. {title}",
    ),
    "png": ("Download PNG", "下载 PNG"),
    "to controls": (
        "Settings ↓",
        "设置 ↓",
    ),
    "to figures": (
        "Figures ↑",
        "图形 ↑",
    ),
    "zoom": (
        "Drag over a figure to zoom, double-click to reset; click a name to hide its curve.",
        "在图上拖动可放大，双击复原；点击名称可隐藏曲线。",
    ),
    "switch": ("中文", "English"),
    "switch label": ("中文：切换到简体中文", "English: switch to English"),
    "controls": ("Controls", "控件"),
    "skip": ("Skip to the figures", "跳到图形"),
    "which head": ("Head", "头"),
    # gallery
    "encoding": (
        "Encoding",
        "编码",
    ),
    "family": ("Family", "类别"),
    "enters": ("Applied to", "作用于"),
    "parameters": ("Parameters", "参数"),
    "extrapolates": ("Extrapolates", "能否外推"),
    "used by": (
        "Used by",
        "使用者",
    ),
    "when": ("When to choose it", "何时选用"),
    "sizes drawn": (
        "{parameters} as drawn, with d_model {d_model} and {heads} heads",
        "图中为 {parameters} 个：d_model {d_model}，{heads} 个头",
    ),
    "values drawn": (
        "Values drawn",
        "图中数值",
    ),
    "tables trained": (
        "{names}: the table of a small model of the lab ({layers} layers, width {width}, {heads} heads), trained to fill in masked bytes of Python source, {steps} steps of {batch} × {length} bytes. Larger models learn other numbers; the shape is typical.",
        "{names}：取自 posenc 实验（lab）训练的小模型（{layers} 层，宽度 {width}，{heads} 个头），任务是补全 Python 源代码中被遮盖的字节，{steps} 步，每步 {batch} × {length} 个字节。更大的模型会学到不同的数值，但形状有代表性。",
    ),
    "mean query": (
        "Shaw's vectors are multiplied by the query; the score is that of the mean query of each head.",
        "Shaw 的向量要与查询相乘；图中的得分取每个头的平均查询。",
    ),
    "tables untrained": (
        "{names}: untrained. Its tables are random, so the figure shows how it works, not what a model learns.",
        "{names}：未训练。表中是随机数，因此图形只说明其原理，并非模型学到的结果。",
    ),
    "several axes": (
        "{names}: for images and video. mrope is drawn for text, where its three axes are equal; axial and sinusoidal_2d for image patches, numbered row by row.",
        "{names}：用于图像和视频。mrope 按文本绘制，此时三个轴相同；axial 和 sinusoidal_2d 按逐行编号的图像块绘制。",
    ),
    "documentation": ("Documentation", "文档"),
    "page of": ("The page of {name}", "{name} 的页面"),
    # learn
    "chapter": ("Chapter", "章"),
    "chapter before": ("← Back", "← 上一章"),
    "chapter after": ("Next →", "下一章 →"),
    "try it": ("Try it:", "试一试："),
    "number of figures": ("The number to change", "要改变的数"),
    "whole chapter": ("The whole chapter: derivation, code, exercises", "整章：推导、代码、习题"),
    # compare
    "encoding of": ("Encoding {slot}", "编码 {slot}"),
    "no encoding here": ("(none)", "（无）"),
    "no encoding": (
        "Choose at least one encoding.",
        "请至少选择一种编码。",
    ),
    "bad options": (
        "{options}: an option has a value of the wrong type (text instead of a number?).",
        "{options}：某个选项的值类型不对（是否把文字当成了数字？）。",
    ),
    "length": ("Length (tokens)", "长度（词元）"),
    "train": ("Training length (tokens)", "训练长度（词元）"),
    "play": (
        "Play: grow past the training length",
        "播放：逐步超过训练长度",
    ),
    "sampled": (
        "The heat maps show {most} of the {length} positions on each side, evenly spaced; the CSV holds all of them.",
        "热图每边等间隔地显示 {length} 个位置中的 {most} 个；CSV 包含全部位置。",
    ),
    "sampled csv": (
        "The heat maps show {most} of the {length} positions on each side, evenly spaced; the CSV holds the same positions for the heat maps, and every distance for the curves.",
        "热图每边等间隔地显示 {length} 个位置中的 {most} 个；CSV 中热图与此相同，曲线则包含每一个距离。",
    ),
    "compare over": (
        "What position adds to the last query's scores, head {head}",
        "位置给最后一个查询的得分加了多少，头 {head}",
    ),
    "compare far": (
        "Far field: constant, decaying or oscillating",
        "远处：常数、衰减或振荡",
    ),
    "compare attention": (
        "{low} to {high} of the last query's attention lies {train} or more tokens back",
        "最后一个查询的注意力有 {low} 到 {high} 落在 {train} 个词元以前",
    ),
    "colour limits": (" (colours: ±{most})", "（颜色：±{most}）"),
    "scale": (
        "Score axis",
        "得分轴",
    ),
    "scale cut": (
        "linear, cut off at −24",
        "线性，在 −24 处截断",
    ),
    "scale full": (
        "linear, everything",
        "线性，全部",
    ),
    "scale log": (
        "logarithmic, both signs",
        "对数，含正负",
    ),
    "scale own": (
        "each curve by its own largest",
        "每条曲线除以自身最大值",
    ),
    "axis": (
        "Distance axis",
        "距离轴",
    ),
    "axis linear": (
        "linear",
        "线性",
    ),
    "axis log": (
        "logarithmic",
        "对数",
    ),
    "colours": (
        "Colours of the heat maps",
        "热图颜色",
    ),
    "colours own": (
        "each by its own largest",
        "各自的最大值",
    ),
    "colours shared": (
        "one scale for all",
        "统一的范围",
    ),
    "score own": (
        "score ÷ the curve's largest |score|",
        "得分 ÷ 该曲线的最大绝对值",
    ),
    "curve hidden": (
        "{name} varies by {spread} here, which this scale draws as a straight line; choose another score axis to see it.",
        "{name} 在此仅变化 {spread}，在这个坐标轴上看起来是直线；换一种得分轴即可看清。",
    ),
    "curve zero": (
        "{name} is zero at every distance: it adds nothing to the scores.",
        "{name} 在所有距离上都是零：它不改变得分。",
    ),
    "past distance": (
        "distance into the past (tokens)",
        "到过去的距离（词元）",
    ),
    "weight": ("attention weight", "注意力权重"),
    "costs": (
        "Cost at {length} tokens",
        "{length} 个词元时的代价",
    ),
    "own memory": (
        "Memory of its tables",
        "自身的表所占内存",
    ),
    "dense memory": (
        "Memory of a dense float32 bias",
        "稠密 float32 偏置所占内存",
    ),
    "constant beyond": (
        "Constant beyond (past / future)",
        "超过此距离为常数（过去 / 未来）",
    ),
    "share past": (
        "Attention beyond the training length",
        "训练长度以外的注意力",
    ),
    "never": ("never, within 255", "255 以内没有"),
    # sentence
    "text": ("Text", "文本"),
    "text empty": (
        "There are no tokens in the text; type something.",
        "文本中没有词元；请输入一些文字。",
    ),
    "text long": (
        "The text has {length:,} characters; at most {most:,} are drawn. Shorten it.",
        "文本有 {length:,} 个字符；最多绘制 {most:,} 个。请缩短。",
    ),
    "tokens cut": ("The first {most} of {number} tokens are drawn.", "只绘制 {number} 个词元中的前 {most} 个。"),
    "tokens": (
        "Tokens",
        "词元",
    ),
    "sample text": ("the cat sat on the mat because the mat was warm", "猫坐在垫子上，因为垫子很暖和"),
    "random tables": (
        "* random tables: the pattern shows that position matters, not how a model uses it. t5 and clipped have trained biases.",
        "* 随机的表：图案只说明位置会起作用，并非模型学到的用法。t5 和 clipped 使用训练得到的偏置。",
    ),
    "tokens how": (
        "Words, runs of signs, and single Chinese or Japanese characters; no model's tokenizer is used.",
        "按词、连续的符号切分，汉字和假名每字一个；不使用任何模型的分词器。",
    ),
    "strength": (
        "Size of random tables",
        "随机表的大小",
    ),
    "strength why": (
        "Tables of this layer are untrained; this is their standard deviation.",
        "这一层的表未经训练；这是其标准差。",
    ),
    "causal": (
        "Causal: later tokens are masked",
        "因果：屏蔽后面的词元",
    ),
    "change": (
        "What to change",
        "改变什么",
    ),
    "swap": (
        "swap two tokens",
        "交换两个词元",
    ),
    "shift": (
        "shift the positions",
        "平移位置",
    ),
    "first word": (
        "First token (number)",
        "第一个词元（编号）",
    ),
    "second word": (
        "Second token (number)",
        "第二个词元（编号）",
    ),
    "clamped": (
        "The tokens are numbered 0 to {last}, so {first} and {second} are swapped.",
        "词元编号为 0 到 {last}，因此交换的是 {first} 和 {second}。",
    ),
    "shift by": ("Start at position", "起始位置"),
    "terms absent": (
        "{name} has no such terms: {terms}.",
        "{name} 没有以下各项：{terms}。",
    ),
    "key word": (
        "key token j",
        "键（key）词元 j",
    ),
    "query word": (
        "query token i",
        "查询（query）词元 i",
    ),
    "difference": ("change of weight", "权重变化"),
    "before": ("Before", "之前"),
    "after swap": (
        "After the swap, put back in order",
        "交换之后，按原顺序排列",
    ),
    "difference swap": (
        "Effect of the swap beyond the tokens themselves",
        "除词元本身之外，交换带来的变化",
    ),
    "after shift": ("Starting at position {shift}", "从位置 {shift} 开始"),
    "difference shift": (
        "Effect of the shift",
        "平移带来的变化",
    ),
    "swap nothing": (
        "{name}: swapping “{one}” and “{other}” only reorders the pattern: it does not depend on order here.",
        "{name}：交换“{one}”和“{other}”只是重排了图案；此处与顺序无关。",
    ),
    "swap something": (
        "{name}: swapping “{one}” and “{other}” changes weights by up to {most}: it depends on order.",
        "{name}：交换“{one}”和“{other}”使权重最多改变 {most}；它与顺序有关。",
    ),
    "swap one": (
        "{name}: the text has one token, which attends to itself; swapping needs two.",
        "{name}：文本只有一个词元，它只关注自己；交换需要两个词元。",
    ),
    "shift nothing": (
        "{name}: starting at {shift} changes nothing: only distances matter.",
        "{name}：从位置 {shift} 开始没有任何变化；只与距离有关。",
    ),
    "shift something": (
        "{name}: starting at {shift} changes weights by up to {most}: absolute positions matter.",
        "{name}：从位置 {shift} 开始使权重最多改变 {most}；与绝对位置有关。",
    ),
    # extend
    "model": ("Model", "模型"),
    "model why": (
        "From published configurations; compare with your checkpoint's own.",
        "取自公开的配置；请与自己的检查点核对。",
    ),
    "own model": (
        "other: the settings below",
        "其他：使用下面的设置",
    ),
    "paste config": ("Or paste its config.json", "或粘贴其 config.json"),
    "config long": (
        "The configuration has {length:,} characters; a config.json has a few thousand.",
        "配置有 {length:,} 个字符；一个 config.json 只有几千个。",
    ),
    "not json": (
        "This is not JSON: {error} in line {line}, column {column}.",
        "这不是 JSON：第 {line} 行第 {column} 列，{error}。",
    ),
    "form empty": (
        "Enter {names} first, or paste a configuration that has them.",
        "请先填写{names}，或粘贴包含它们的配置。",
    ),
    "no rotation": (
        "This configuration has no rotation (no rope_parameters, rope_scaling, rope_theta or rotary_dim), so there is nothing to extend.",
        "此配置没有旋转位置编码（没有 rope_parameters、rope_scaling、rope_theta 或 rotary_dim），因此没有可扩展的内容。",
    ),
    "config sections": (
        "This configuration has mrope_section: its positions have several axes, and this page extends one. posenc.MRoPE.from_config reads it.",
        "此配置含有 mrope_section：位置有多个轴，而此页面只扩展一个轴。可用 posenc.MRoPE.from_config 读取。",
    ),
    "config length": (
        "The configuration has no trained length (max_position_embeddings); enter it below.",
        "配置中没有训练长度（max_position_embeddings）；请在下面填写。",
    ),
    "config taken": (
        "Taken from the configuration: {given}. It stays until you change it.",
        "取自配置：{given}。在你修改之前保持不变。",
    ),
    "rotation options": ("Options of the rotation", "旋转的选项"),
    "rotation options why": (
        "NAME=VALUE, separated by commas; settings of a pasted configuration are kept here. Changing the target length removes its factor.",
        "名称=值，用逗号分隔；粘贴的配置内容保留在这里。改变目标长度会去掉其中的 factor。",
    ),
    "rotation option wrong": (
        "Options of the rotation: “{given}” is unknown; {scaling} takes {allowed}, each as NAME=VALUE.",
        "旋转的选项：没有“{given}”；{scaling} 可用 {allowed}，写作 名称=值。",
    ),
    "config head": (
        "The configuration has no head size (head_dim, or hidden_size and num_attention_heads); enter it below.",
        "配置中没有头的维度（head_dim，或 hidden_size 和 num_attention_heads）；请在下面填写。",
    ),
    "not config": (
        "This is not a model's configuration; paste the whole config.json, with its braces.",
        "这不是模型的配置；请粘贴整个 config.json，包括花括号。",
    ),
    "head size": (
        "Head size (channels)",
        "头的维度（通道）",
    ),
    "base": (
        "Base (rope_theta)",
        "基数 base（rope_theta）",
    ),
    "original": ("Trained length (tokens)", "训练长度（词元）"),
    "target": ("Target length (tokens)", "目标长度（词元）"),
    "scaling": ("Scaling", "缩放"),
    "scaling none": ("none", "无"),
    "scaling linear": ("linear (position interpolation)", "线性（位置插值）"),
    "scaling ntk": (
        "NTK-aware base",
        "NTK（改变基数）",
    ),
    "scaling dynamic": ("dynamic NTK", "动态 NTK"),
    "scaling yarn": ("YaRN", "YaRN"),
    "scaling llama3": ("Llama 3", "Llama 3"),
    "scaling longrope": ("LongRoPE (needs its factors)", "LongRoPE（需给出因子）"),
    "scaling proportional": ("p-RoPE, 75 % of the pairs", "p-RoPE，75 % 的通道对"),
    "factors": ("LongRoPE's long factors", "LongRoPE 的 long 因子"),
    "factors why": ("One number per pair, as in long_factor.", "每个通道对一个数，同 long_factor。"),
    "short factors": ("LongRoPE's short factors", "LongRoPE 的 short 因子"),
    "short factors why": (
        "Used up to the trained length, as in short_factor; all 1 if empty.",
        "在训练长度以内使用，同 short_factor；留空则全为 1。",
    ),
    "factors wrong": (
        "LongRoPE's factors must be numbers, separated by commas.",
        "LongRoPE 的因子必须是用逗号分隔的数字。",
    ),
    "factors needed": (
        "LongRoPE divides each pair by its own searched factor: give {pairs} numbers (long_factor or short_factor of the model's configuration), got {given}.",
        "LongRoPE 用各自搜索到的因子除每个通道对：请给出 {pairs} 个数（模型配置中的 long_factor 或 short_factor），当前 {given} 个。",
    ),
    "phases": (
        "{name}: {share} of the pairs reach phases outside the training range",
        "{name}：{share} 的通道对相位超出训练范围",
    ),
    "untrained": ("1: outside the training range", "1：超出训练范围"),
    "no extension": (
        "The target length {target} does not exceed the trained length {original}, so nothing is extended.",
        "目标长度 {target} 不超过训练长度 {original}，因此没有扩展。",
    ),
    "attention factor": (
        "Attention factor {factor}: cos and sin are multiplied by it, scores by {square}.",
        "注意力因子 {factor}：cos 和 sin 乘以它，得分乘以 {square}。",
    ),
    "json": ("Merge into config.json", "合并到 config.json"),
    "json compared": (
        "Compared with the pasted configuration",
        "与粘贴的配置比较",
    ),
    "json same": (
        "The JSON has the same rotation and length as the pasted configuration: no differences.",
        "JSON 的旋转和长度与粘贴的配置完全相同：没有差别。",
    ),
    "json differs": (
        "{number} settings differ (≠). Both are written in one spelling, with defaults filled in.",
        "有 {number} 项不同（≠）。两者用同一种写法，并补全默认值。",
    ),
    "json setting": (
        "Setting",
        "设置",
    ),
    "json pasted": (
        "Pasted",
        "粘贴的配置",
    ),
    "json here": (
        "Here",
        "此处",
    ),
    "json absent": (
        "(not given)",
        "（未给出）",
    ),
    # results
    "run": ("Run folder", "实验文件夹"),
    "run why": ("A folder that posenc compare wrote.", "posenc compare 写出的文件夹。"),
    "no run": (
        "There is no run here yet; posenc compare --preset quick creates one.",
        "这里还没有实验；运行 posenc compare --preset quick 可得到一个。",
    ),
    "not a run": (
        "{run} is not a run: it has neither report.html nor results.json.",
        "{run} 不是实验文件夹：其中没有 report.html 或 results.json。",
    ),
    "no report": (
        "{run} has no report.html; posenc report {run} builds it.",
        "{run} 中没有 report.html；用 posenc report {run} 生成。",
    ),
    "unreadable": ("results.json cannot be read: {error}", "无法读取 results.json：{error}"),
    "open report": (
        "Open the report in a separate window",
        "在新窗口中打开报告",
    ),
    "run of": ("{run}", "{run}"),
    "report of": ("The whole report of {run}", "{run} 的完整报告"),
    "run task": ("{task}: {metric} beyond the training size", "{task}：超出训练规模后的{metric}"),
    "tested size": ("tested size", "测试规模"),
    "accuracy": ("accuracy", "准确率"),
    "exact": ("exact answers", "完全正确率"),
    "loss": ("loss (nats)", "损失（nat）"),
}

BOTH = {**course_texts.TEXTS, **TEXTS}
LANGUAGES = {
    "en": Translation({key: pair[0] for key, pair in BOTH.items()} | dict(ENGLISH.table)),
    "zh": Translation({key: pair[1] for key, pair in BOTH.items()} | dict(CHINESE.table)),
}
PATHS = {"en": "/", "zh": "/zh"}
