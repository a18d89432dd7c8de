"""Every text of the explorer, in English and in Simplified Chinese, by key."""

from __future__ import annotations

from ..plot.translations import ENGLISH, Translation

TEXTS: dict[str, tuple[str, str]] = {
    # the page
    "language": ("en", "zh"),
    "title": ("posenc explorer", "posenc 位置编码浏览器"),
    "subtitle": ("See how positional encodings change attention.", "看一看位置编码对注意力做了什么。"),
    "gallery": ("Gallery", "图鉴"),
    "compare": ("Compare", "比较"),
    "sentence": ("Your sentence", "你的句子"),
    "extend": ("Extend RoPE", "扩展 RoPE"),
    "results": ("Results", "结果"),
    "gallery intro": (
        "One encoding at a time: its formula, figures, users, and when to choose it.",
        "逐个查看：公式、图形、谁在用、何时选用。",
    ),
    "compare intro": (
        "Two or three encodings at one length. The content is the same at every position, so all differences come from "
        "position. mrope is drawn for text, where its three axes are equal; axial and sinusoidal_2d for image patches "
        "numbered row by row.",
        "在同一长度下比较两三种方案。所有内容都相同，因此只有位置在起作用。mrope 按文本绘制，"
        "此时三个轴相同；axial 和 sinusoidal_2d 按逐行编号的图像块绘制。",
    ),
    "sentence intro": (
        "An untrained layer in which a word attends to equal words; the encodings differ in position only. A sentence has "
        "one axis: mrope is drawn for text, and axial and sinusoidal_2d treat the words as image patches.",
        "一个未训练的层，每个词寻找与自己相似的词；各方案之间的差别就是位置。句子只有一个轴：mrope 在这里"
        "只处理文本，axial 和 sinusoidal_2d 把词当作图像块。",
    ),
    "extend intro": (
        "Extend the context of a rotary model: the effect of each scaling on its wavelengths, and the JSON for config.json.",
        "让旋转模型读得更远：每种缩放如何改变波长，以及可粘贴的 JSON。",
    ),
    "results intro": ("Open a run of the lab and its report.", "打开一次实验并浏览其报告。"),
    "figure": ("Figure {number}: {titles}", "图 {number}：{titles}"),
    "figure label": ("Figure {number}", "图 {number}"),
    "comma": (", ", "、"),
    "drawn": ("Drawn.", "已绘制。"),
    "refining": ("Drawn coarsely; the finer figure follows.", "已粗略绘制，精细的图随后出现。"),
    "drawing": ("Drawing", "正在绘制"),
    "no response": (
        "The explorer does not respond; is posenc explore still running?",
        "浏览器服务没有回应；posenc explore 还在运行吗？",
    ),
    "bad request": ("The page is older than the server; load it again.", "页面比服务器旧；请重新加载。"),
    "library": ("{error}", "无法这样设置（原文）：{error}"),
    "link long": (
        "The link is {length:,} characters long; at most {most:,} are allowed.",
        "链接有 {length:,} 个字符；最多允许 {most:,} 个。",
    ),
    "unknown parameters": (
        "The link has parameters that this page does not know: {unknown}.",
        "链接中有此页面不认识的参数：{unknown}。",
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
        "头的大小 {head_dim} 必须是偶数：RoPE 旋转的是成对的通道。",
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
        "{encoding}：{option} 是层的大小，所有图都相同；请去掉它。",
    ),
    "option kind": (
        "{encoding}: {option}={given} must be a number, true, false or a word.",
        "{encoding}：{option}={given} 必须是数字、true、false 或一个词。",
    ),
    "failed": ("This cannot be drawn: {error}", "无法绘制：{error}"),
    "code": ("Show the code", "显示代码"),
    "code label": ("posenc code that computes the same values", "得到相同数字的 posenc 代码"),
    "tools": ("Share and export", "分享和导出"),
    "link": ("Link to this view", "此视图的链接"),
    "copy": ("Copy the link", "复制链接"),
    "copy code": ("Copy the code", "复制代码"),
    "copied": ("Copied", "已复制"),
    "csv": ("Download CSV", "下载 CSV"),
    "png": ("Download PNG", "下载 PNG"),
    "switch": ("中文", "English"),
    "switch label": ("中文：切换到简体中文", "English: switch to English"),
    "controls": ("Controls", "控件"),
    "skip": ("Skip to the figures", "跳到图形"),
    "which head": ("Head", "头"),
    # gallery
    "encoding": ("Encoding", "方案"),
    "family": ("Family", "类别"),
    "enters": ("Applied to", "作用于"),
    "parameters": ("Parameters", "参数"),
    "extrapolates": ("Extrapolates", "能否外推"),
    "used by": ("Used by", "使用者"),
    "when": ("When to choose it", "何时选用"),
    "sizes drawn": (
        "{parameters} as drawn, with d_model {d_model} and {heads} heads",
        "此处 {parameters} 个，d_model {d_model}，{heads} 个头",
    ),
    # compare
    "encoding of": ("Encoding {slot}", "方案 {slot}"),
    "no encoding here": ("(none)", "（无）"),
    "no encoding": ("Choose at least one encoding.", "请至少选择一种方案。"),
    "bad options": (
        "{options}: an option has a value of the wrong type (text instead of a number?).",
        "{options}：某个选项的值类型不对（是否把文字当成了数字？）。",
    ),
    "length": ("Length (tokens)", "长度（词元）"),
    "train": ("Training length (tokens)", "训练长度（词元）"),
    "play": ("Play: grow beyond the training length", "播放：长度增长超过训练长度"),
    "sampled": (
        "The heat maps show {most} of the {length} positions on each side, evenly spaced; the CSV holds all of them.",
        "热图在每条边上显示 {length} 个位置中等间隔的 {most} 个；CSV 中是全部位置。",
    ),
    "sampled csv": (
        "The heat maps show {most} of the {length} positions on each side, evenly spaced; the CSV holds the same "
        "positions for the heat maps, and every distance for the curves.",
        "热图在每条边上显示 {length} 个位置中等间隔的 {most} 个；CSV 中热图也是这些位置，曲线则是每一个距离。",
    ),
    "compare over": (
        "Contribution of position to the last query's scores, head {head}",
        "位置对最后一个查询得分的贡献，头 {head}",
    ),
    "compare far": ("Far field: constant, decaying or oscillating", "远场：常数、衰减或振荡"),
    "compare attention": (
        "{low} to {high} of the last query's attention is on keys {train} or more tokens back",
        "最后一个查询有 {low} 到 {high} 的注意力落在 {train} 个词元以前",
    ),
    "colours": ("(colours: ±{most})", "（颜色：±{most}）"),
    "past distance": ("distance into the past (tokens)", "向过去的距离（词元）"),
    "weight": ("attention weight", "注意力权重"),
    "costs": ("Cost at {length} tokens", "{length} 个词元时的代价"),
    "own memory": ("Memory of its tables", "自身表的内存"),
    "dense memory": ("Memory of a dense float32 bias", "稠密 float32 偏置的内存"),
    "constant beyond": ("Constant beyond (past / future)", "超出此距离为常数（过去 / 未来）"),
    "share past": ("Attention beyond the training length", "超出训练长度的注意力"),
    "never": ("never, within 255", "255 以内没有"),
    # sentence
    "text": ("Text", "文本"),
    "text empty": ("There are no words in the text; type a sentence.", "文本中没有词；请输入一句话。"),
    "text long": (
        "The text has {length:,} characters; at most {most:,} are drawn. Shorten it.",
        "文本有 {length:,} 个字符；最多绘制 {most:,} 个。请缩短。",
    ),
    "tokens cut": ("The first {most} of {number} tokens are drawn.", "只绘制 {number} 个词元中的前 {most} 个。"),
    "tokens": ("Tokens", "词元"),
    "strength": ("Strength of learned tables", "可学习表的强度"),
    "strength why": (
        "Untrained tables are random; this is their standard deviation.",
        "未训练的表是随机的；这是其标准差。",
    ),
    "causal": ("Causal: later words are masked", "因果：后面的词被屏蔽"),
    "change": ("What to change", "改变什么"),
    "swap": ("swap two words", "交换两个词"),
    "shift": ("shift the sentence", "平移句子"),
    "first word": ("First word (number)", "第一个词（编号）"),
    "second word": ("Second word (number)", "第二个词（编号）"),
    "no such word": (
        "The words are numbered 0 to {last}; choose two of them.",
        "词的编号是 0 到 {last}；请选择其中两个。",
    ),
    "shift by": ("Start at position", "起始位置"),
    "terms absent": ("{name} has no such terms: {terms}.", "{name} 没有这些项：{terms}。"),
    "key word": ("key word j", "键词 j"),
    "query word": ("query word i", "查询词 i"),
    "difference": ("change of weight", "权重变化"),
    "before": ("Before", "之前"),
    "after swap": ("After the swap, put back in order", "交换之后，恢复原来的顺序"),
    "difference swap": ("Effect of the swap beyond the words themselves", "除词本身之外，交换改变了什么"),
    "after shift": ("Starting at position {shift}", "从位置 {shift} 开始"),
    "difference shift": ("Effect of the shift", "平移改变了什么"),
    "swap nothing": (
        "{name}: swapping “{one}” and “{other}” only reorders the pattern: it does not depend on order here.",
        "{name}：交换“{one}”和“{other}”只是重新排列了图案；在这里它不区分顺序。",
    ),
    "swap something": (
        "{name}: swapping “{one}” and “{other}” changes weights by up to {most}: it depends on order.",
        "{name}：交换“{one}”和“{other}”使权重最多改变 {most}；它能感知顺序。",
    ),
    "shift nothing": (
        "{name}: starting at {shift} changes nothing: only distances matter.",
        "{name}：从 {shift} 开始没有任何变化；只有距离起作用。",
    ),
    "shift something": (
        "{name}: starting at {shift} changes weights by up to {most}: absolute positions matter.",
        "{name}：从 {shift} 开始使权重最多改变 {most}；绝对位置起作用。",
    ),
    # extend
    "model": ("Model", "模型"),
    "model why": (
        "From published configurations; compare with your checkpoint's own.",
        "取自公开的配置；请与你的检查点自己的配置核对。",
    ),
    "own model": ("other: enter its settings below", "其他：在下面填写其设置"),
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
        "配置中没有头的大小（head_dim，或 hidden_size 和 num_attention_heads）；请在下面填写。",
    ),
    "not config": (
        "This is not a model's configuration; paste the whole config.json, with its braces.",
        "这不是模型的配置；请粘贴整个 config.json，包括花括号。",
    ),
    "head size": ("Head size (channels)", "头的大小（通道）"),
    "base": ("Base (rope_theta)", "基数（rope_theta）"),
    "original": ("Trained length (tokens)", "训练长度（词元）"),
    "target": ("Target length (tokens)", "目标长度（词元）"),
    "scaling": ("Scaling", "缩放"),
    "scaling none": ("none", "无"),
    "scaling linear": ("linear (position interpolation)", "线性（位置插值）"),
    "scaling ntk": ("NTK-aware base", "NTK 基数"),
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
        "{name}：{share} 的通道对的相位超出训练范围",
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
    # results
    "run": ("Run folder", "实验文件夹"),
    "run why": ("A folder that posenc compare wrote.", "posenc compare 写出的文件夹。"),
    "no run": (
        "There is no run here yet; posenc compare --preset quick creates one.",
        "这里还没有实验：运行 posenc compare --preset quick 可以得到一个。",
    ),
    "choose run": ("Choose a run: {runs}.", "请选择一次实验：{runs}。"),
    "not a run": (
        "{run} is not a run: it has neither report.html nor results.json.",
        "{run} 不是实验文件夹：其中没有 report.html 或 results.json。",
    ),
    "no report": (
        "{run} has no report.html; posenc report {run} builds it.",
        "{run} 中没有 report.html；用 posenc report {run} 生成。",
    ),
    "unreadable": ("results.json cannot be read: {error}", "无法读取 results.json：{error}"),
    "open report": ("Open the report in a separate window", "在单独的窗口中打开报告"),
    "report of": ("Report of {run}", "{run} 的报告"),
    "run task": ("{task}: {metric} beyond the training size", "{task}：超出训练规模后的{metric}"),
    "tested size": ("tested size", "测试规模"),
    "accuracy": ("accuracy", "准确率"),
    "exact": ("exact answers", "完全正确率"),
    "loss": ("loss (nats)", "损失（nat）"),
}

FIGURES_ZH = {
    "position": "位置（词元）",
    "distance": "距离 r = j − i（词元；负：过去）",
    "dimension": "维度",
    "cos, sin of pair": "通道（先是各对的余弦，再是正弦）",
    "head": "头",
    "all heads": "所有头",
    "pair": "通道对",
    "value": "数值",
    "cosine": "余弦相似度",
    "score": "得分（logit）",
    "row": "表的行",
    "key j": "键位置 j（词元）",
    "query i": "查询位置 i（词元）",
    "wavelength": "波长（旋转一圈的词元数）",
    "encoding position": "{name}：每个位置的向量",
    "encoding distance": "{name}：每个距离对应的表行",
    "dimensions": "{name}：从第一个到最后一个的单个通道",
    "similarity": "{name}：两个位置的余弦相似度（1：方向相同）",
    "kernel": "{name}，头 {head}：{pattern}",
    "flat": "位置没有给任何得分加值",
    "stripes": "每条对角线为常数，只有 j − i 起作用",
    "no stripes": "对角线上的值在变化，绝对位置起作用",
    "over distance": "{name}：位置对得分的贡献；{pattern}",
    "heads agree": "所有头相同",
    "heads differ": "各头不同",
    "buckets": "{name}：每个距离对应的表行；到 {low} 为止和从 {high} 起为常数",
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

LANGUAGES = {
    "en": Translation({key: pair[0] for key, pair in TEXTS.items()} | dict(ENGLISH.table)),
    "zh": Translation({key: pair[1] for key, pair in TEXTS.items()} | FIGURES_ZH),
}
PATHS = {"en": "/", "zh": "/zh"}
