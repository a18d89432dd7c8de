"""Every sentence of the lab's reports (texts.toml), in English or Simplified Chinese."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.translation import read_texts

LANGUAGES = {"en": "English", "zh": "中文"}
TAGS = {"en": "en", "zh": "zh-Hans"}  # the languages' tags in HTML

TEXTS: dict[str, tuple[str, str]] = {
    # ---- units and lists
    "and": (" and ", " 和 "),
    "clauses": (" and ", "，"),
    "semicolon": (", ", "；"),
    "comma": (", ", "、"),
    "space": (" ", ""),
    "bytes": ("{size:,} bytes", "{size:,} 字节"),
    "size": ("size {size:,}", "规模 {size:,}"),
    "loss unit": ("nats per byte", "nat/字节"),
    "accuracy unit": ("of the answers right", "答案正确率"),
    "loss axis": ("loss, nats per byte: lower is better", "损失（nat/字节）：越低越好"),
    "accuracy axis": ("share of right answers: higher is better", "正确答案的比例：越高越好"),
    "sliding axis": ("loss of the last {stride} bytes, nats per byte", "最后 {stride} 个字节的损失（nat/字节）"),
    "training axis": ("training loss, nats", "训练损失（nat）"),
    "bytes axis": ("length of the text, bytes", "文本长度（字节）"),
    "size axis": ("size of the problem", "题目规模"),
    "step axis": ("training step", "训练步数"),
    "trained": ("training length", "训练长度"),
    "trained size": ("training size", "训练规模"),
    "seeds 1": ("one seed", "一个随机种子"),
    "seeds n": ("{count} seeds", "{count} 个随机种子"),
    "seeds range": ("{least} to {most} seeds", "{least} 到 {most} 个随机种子"),
    # ---- tasks
    "task text": ("predict the next byte of real text", "预测真实文本的下一个字节"),
    "task copy": ("write the sequence again", "重写序列"),
    "task reverse": ("write the sequence backwards", "倒着写出序列"),
    "task sort": ("write the symbols in order", "按顺序写出符号"),
    "task recall": ("find a pair again after n tokens of noise", "隔着 n 个噪声词元找回一对符号"),
    "task addition": ("add two numbers, lowest digit first", "两数相加，从最低位写起"),
    "task flipflop": ("remember the last written bit through noise", "隔着噪声记住最后写入的比特"),
    "task parity": ("is the number of ones odd? (negative control)", "1 的个数是否为奇数（反向对照）"),
    "task previous": ("name the symbol just before", "说出紧邻的前一个符号"),
    "task neighbour": ("name the symbol some positions later (encoder)", "说出若干位置之后的符号（编码器）"),
    # ---- verdicts
    "holds": ("holds", "保持"),
    "loses": ("loses", "变差"),
    "breaks": ("breaks", "崩溃"),
    "cannot": ("cannot run", "无法运行"),
    "not learnt": ("not learnt", "未学会"),
    "missing": ("not measured", "未测"),
    "define loss": (
        "From the training length to the longest test, an encoding holds if its loss rises by at most {hold:g} "
        "nats per byte, loses if it rises by up to {broken:g}, breaks if it rises more, and cannot run if it has no "
        "vector for such positions. An extension (after +) is applied in tests only and compared with the same weights without it.",
        "从训练长度到最长的测试：损失上升不超过 {hold:g} nat/字节为“保持”，不超过 {broken:g} 为“变差”，更多为“崩溃”；"
        "没有相应位置的向量则“无法运行”。扩展（+ 之后）只在测试时使用，与不加扩展的同一组权重比较。",
    ),
    "define accuracy": (
        "On tasks with right answers: holds, at most {hold:.0%} fewer of them right; loses, up to {broken:.0%}; breaks, more; "
        "not learnt, under {learnt:.0%} right at the training size.",
        "有标准答案的任务：正确率下降不超过 {hold:.0%} 为“保持”，不超过 {broken:.0%} 为“变差”，更多为“崩溃”；"
        "训练规模下正确率低于 {learnt:.0%} 为“未学会”。",
    ),
    # ---- the answer
    "no result": ("Nothing was measured yet.", "还没有测量结果。"),
    "provisional": (
        "Provisional: {finished} of {wanted} trials are finished.",
        "暂定结论：{wanted} 次试验完成了 {finished} 次。",
    ),
    "here best": (
        "At the training length, {size}: {names} ({score} {unit}).",
        "训练长度 {size}：用 {names}（{score} {unit}）。",
    ),
    "here level": (
        "At the training length, {size}: {names}, all level ({low} to {high} {unit}).",
        "训练长度 {size}：{names} 不相上下（{low} 至 {high} {unit}）。",
    ),
    "here next": ("Next: {names}.", "其次：{names}。"),
    "learned little": (
        "These models have learned little: the frequencies of bytes alone give about {loss:g}.",
        "这些模型几乎没有学到东西：仅凭字节频率就能达到约 {loss:g}。",
    ),
    "here task": (
        "The task, {task}: {what} ({source}); lower is better.",
        "任务 {task}：{what}（{source}）；越低越好。",
    ),
    "here problem": ("The task, {task}: {what}.", "任务 {task}：{what}。"),
    "far alone": (
        "Past it, to {size} ({times:g} ×): {best}. It alone holds ({change} {unit}).",
        "超出训练长度，到 {size}（{times:g} 倍）：用 {best}。只有它保持（{change} {unit}）。",
    ),
    "far first": (
        "Past it, to {size} ({times:g} ×): {best}. It holds ({change} {unit}).",
        "超出训练长度，到 {size}（{times:g} 倍）：用 {best}。它保持（{change} {unit}）。",
    ),
    "far none": (
        "Past it, to {size} ({times:g} ×): none holds; {best} comes nearest ({change} {unit}).",
        "超出训练长度，到 {size}（{times:g} 倍）：没有一种保持；{best} 最接近（{change} {unit}）。",
    ),
    "far unknown": ("Past it: nothing was measured at {size}.", "超出训练长度：在 {size} 处没有测量结果。"),
    "far stronger alone": (
        "Past it: {best}. In larger models, on an {gpu}, it alone holds: {change} from {from_:,} to {to}.",
        "超出训练长度：用 {best}。在 {gpu} 上更大的模型中，从 {from_:,} 到 {to}，只有它保持：{change}。",
    ),
    "far stronger": (
        "Past it: {best}. In larger models, on an {gpu}, it holds: {change} from {from_:,} to {to}.",
        "超出训练长度：用 {best}。在 {gpu} 上更大的模型中，从 {from_:,} 到 {to}，它保持：{change}。",
    ),
    "far stronger none": (
        "Past it: none holds in larger models, on an {gpu}; {best} comes nearest: {change} from {from_:,} to {to}.",
        "超出训练长度：在 {gpu} 上更大的模型中，从 {from_:,} 到 {to}，没有一种保持；{best} 最接近：{change}。",
    ),
    "holds means": (
        "“Holds”: its loss rises by at most {hold:g} nats per byte.",
        "“保持”：损失上升不超过 {hold:g} nat/字节。",
    ),
    "holds means accuracy": (
        "“Holds”: at most {hold:.0%} fewer answers are right.",
        "“保持”：正确率下降不超过 {hold:.0%}。",
    ),
    "also hold": ("{names} hold too.", "{names} 也保持。"),
    "also hold 1": ("{names} holds too.", "{names} 也保持。"),
    "disagree": (
        "This run's small models look better: to {size} {names} hold. But in the larger ones {there}. Trust the larger run: {reasons}.",
        "本次的小模型看起来更好：到 {size}，{names} 保持。但在更大的模型中，{there}。请相信更大的那次实验：{reasons}。",
    ),
    "disagree 1": (
        "This run's small models look better: to {size} {names} holds. But in the larger ones {there}. Trust the larger run: {reasons}.",
        "本次的小模型看起来更好：到 {size}，{names} 保持。但在更大的模型中，{there}。请相信更大的那次实验：{reasons}。",
    ),
    "there loses": ("{names} lose", "{names} 变差"),
    "there loses 1": ("{names} loses", "{names} 变差"),
    "there breaks": ("{names} break", "{names} 崩溃"),
    "there breaks 1": ("{names} breaks", "{names} 崩溃"),
    "there cannot": ("{names} cannot run", "{names} 无法运行"),
    "there cannot 1": ("{names} cannot run", "{names} 无法运行"),
    "there missing": ("{names} were not measured", "{names} 未测"),
    "there missing 1": ("{names} was not measured", "{names} 未测"),
    "agree": ("This run, with small models to {size}, agrees.", "本次的小模型（测到 {size}）与此一致。"),
    "not here": ("{best} is not part of this run.", "本次没有训练 {best}。"),
    "weaker": (
        "This run's small models, to {size}: {names}. Trust the larger run: {reasons}.",
        "本次的小模型，到 {size}：{names}。请相信更大的那次实验：{reasons}。",
    ),
    "none holds here": ("none holds", "没有一种保持"),
    "reason parameters": ("{times:.0f} × the parameters ({parameters})", "参数量是 {times:.0f} 倍（{parameters}）"),
    "reason seeds": ("{theirs} seeds instead of {ours}", "{theirs} 个随机种子，而非 {ours} 个"),
    "reason data": ("{times:.0f} × the training text", "训练文本是 {times:.0f} 倍"),
    "reason reach": (
        "tested to {theirs:g} × its training length instead of {ours:g} ×",
        "测到训练长度的 {theirs:g} 倍，而非 {ours:g} 倍",
    ),
    "million": ("{count:.1f} M", "{count:.1f} 百万"),
    "other tasks": ("On {task} ({what}) {groups}.", "在 {task}（{what}）上，{groups}。"),
    "group holds": ("{names} hold", "{names} 保持"),
    "group holds 1": ("{names} holds", "{names} 保持"),
    "group not learnt": ("{names} do not learn it", "{names} 没有学会"),
    "group not learnt 1": ("{names} does not learn it", "{names} 没有学会"),
    "group nobody": ("none holds", "没有一种保持"),
    "more tasks": ("{count} further tasks are in the table.", "其余 {count} 个任务见表。"),
    "sure one": (
        "How sure: one seed, so differences under {noise:g} {unit} are noise; {clear}.",
        "有多确定：只有一个随机种子，小于 {noise:g} {unit} 的差别是噪声；{clear}。",
    ),
    "clear": ("what breaks loses {least:.2f} or more, which is not", "崩溃的至少变差 {least:.2f}，不是噪声"),
    "clear none": ("a second seed may change the order", "换一个种子，次序可能改变"),
    "sure apart": (
        "How sure: {seeds}; at {size} {first} ({a}) leads {second} ({b}) by more than chance.",
        "有多确定：{seeds}；在 {size} 处，{first}（{a}）领先 {second}（{b}），不是偶然。",
    ),
    "sure level": (
        "How sure: {seeds}; at {size} {first} ({a}) and {second} ({b}) may be level.",
        "有多确定：{seeds}；在 {size} 处，{first}（{a}）与 {second}（{b}）可能不相上下。",
    ),
    "sure alone": (
        "How sure: {seeds}; only {first} was measured at {size}.",
        "有多确定：{seeds}；在 {size} 处只测了 {first}。",
    ),
    "sure stronger": (
        "How sure: the larger run has {seeds}; {first} ({a}) leads {second} ({b}) by more than chance.",
        "有多确定：更大的那次实验有 {seeds}；{first}（{a}）领先 {second}（{b}），不是偶然。",
    ),
    "chance": ("More than chance: beyond both 95 % intervals.", "“不是偶然”：差距大于两者的 95% 置信区间之和。"),
    "this one seed": (
        "In this run, with one seed, differences under {noise:g} {unit} are noise.",
        "本次只有一个随机种子，小于 {noise:g} {unit} 的差别是噪声。",
    ),
    "this seeds": ("This run: {seeds}, with 95 % intervals.", "本次：{seeds}，附 95% 置信区间。"),
    "published agrees": (
        "{agree} of {found} entries of the published tables ({papers}) agree on who holds and who loses.",
        "在已发表的表格（{papers}）中，{found} 项里有 {agree} 项与此一致（保持还是变差）。",
    ),
    "published agrees stronger": (
        "{agree} of {found} entries of the published tables ({papers}) agree with the larger run on who holds and who loses.",
        "在已发表的表格（{papers}）中，{found} 项里有 {agree} 项与更大的那次实验一致（保持还是变差）。",
    ),
    "limits stronger": (
        "The larger run's text is {theirs}, this run's is {ours}; both are one kind of model, without fine-tuning at the "
        "longer lengths.",
        "更大的那次实验的文本是 {theirs}，本次是 {ours}；两次都是同一种模型，且没有在更长的长度上微调。",
    ),
    "limits": (
        "All of it is one kind of model on {source}, without fine-tuning at the longer lengths.",
        "以上都是同一种模型、同一种文本（{source}），且没有在更长的长度上微调。",
    ),
    # ---- the summary's figure, table and set-up
    "figure of": ("{task}: trained at {train}, tested to {far}", "{task}：训练长度 {train}，测到 {far}"),
    "figure here": ("This run: smaller models, to {far}", "本次：小模型，测到 {far}"),
    "figure stronger": ("Stronger evidence: {gpu} run, to {far}", "更强的证据：{gpu}，测到 {far}"),
    "read figure": (
        "A flat or falling line holds; a rising one gets worse. The tinted lengths were never trained. Numbers: loss at the longest one. Point at a line, or tap it, to see it alone.",
        "平或下降的线保持，上升的线变差。浅色区域的长度从未训练过。数字：最长处的损失。指向或点按一条线可单独查看。",
    ),
    "read figure accuracy": (
        "A flat line holds; a falling one gets worse. The tinted sizes were never trained. Numbers: share of right answers at the largest one.",
        "平的线保持，下降的线变差。浅色区域的规模从未训练过。数字：最大处的正确率。",
    ),
    "interval": ("Shaded: 95 % intervals.", "阴影：95% 置信区间。"),
    "encoding": ("encoding", "编码"),
    "this run": ("this run", "本次"),
    "stronger run": ("stronger: {gpu}", "更强：{gpu}"),
    "verdict": ("verdict", "结论"),
    "from to": ("loss {from_} → {to}", "损失 {from_} → {to}"),
    "right from to": ("right {from_} → {to}", "正确率 {from_} → {to}"),
    "setup": ("How the models were made", "模型是怎样得到的"),
    "setup model": (
        "{task}: models of {layers} and width {width} with {heads} heads, {parameters} parameters; {steps:,} training steps of "
        "{data}, {seeds}, learning rate {lr:g}.",
        "{task}：{layers}，宽 {width}，{heads} 个头，{parameters} 参数；训练 {steps:,} 步，每步 {data}，{seeds}，学习率 {lr:g}。",
    ),
    "layers 1": ("one layer", "一层"),
    "layers n": ("{count} layers", "{count} 层"),
    "data loss": ("{batch} windows of {train}", "{batch} 个 {train} 的窗口"),
    "data accuracy": ("{batch} problems up to {train}", "{batch} 道题，至多{train}"),
    "setup task": ("{task} ({what})", "{task}（{what}）"),
    "setup text": ("Text: {source}.", "文本：{source}。"),
    "setup rate": (
        "position_lr = {rate:g}: an encoding's own parameters learn at {rate:g} × the model's rate. This favours encodings with "
        "trained tables ({tables}), which could not move far enough in so few steps otherwise; {free} have no such parameters "
        "and gain nothing from it.",
        "position_lr = {rate:g}：编码自身的参数以模型学习率的 {rate:g} 倍学习。这有利于带可训练表的编码（{tables}），"
        "否则在这么少的步数里它们走不了多远；{free} 没有这种参数，不受影响。",
    ),
    "setup same rate": (
        "position_lr = 1: an encoding's own parameters learn at the model's rate. This favours encodings without trained tables.",
        "position_lr = 1：编码自身的参数与模型的学习率相同。这有利于没有可训练表的编码。",
    ),
    "setup equal": (
        "All else is equal: the same weights outside the encoding, the same data for each seed.",
        "其余完全相同：编码之外的权重相同，每个种子的数据相同。",
    ),
    "standard library": ("the source code of Python {python}'s standard library", "Python {python} 标准库的源代码"),
    "standard library ?": ("the source code of Python's standard library", "Python 标准库的源代码"),
    "source size": ("{source}, {megabytes} MB to train on", "{source}，训练用 {megabytes} MB"),
    "unknown text": ("a text", "一份文本"),
    # ---- the rest of the report
    "details task": ("{task}: every length", "{task}：每个长度"),
    "details training": ("Training: curves, speed and memory", "训练：曲线、速度与内存"),
    "details steps": ("{task}: verdicts after parts of the training", "{task}：训练到不同步数时的结论"),
    "after steps": ("{steps:,} steps", "{steps:,} 步"),
    "steps about": (
        "Scores at {train:,} → {far:,} of the same models in the middle of their training and at its end ({last:,} steps); the "
        "learning rate falls to the end, so earlier scores are somewhat higher than those of a shorter training would be.",
        "同一组模型在训练中途与结束时（{last:,} 步）在 {train:,} → {far:,} 的得分；学习率一直下降到最后，"
        "因此中途的损失比一次较短的完整训练略高。",
    ),
    "steps settled": (
        "No verdict changes from {before:,} to {last:,} steps.",
        "从 {before:,} 步到 {last:,} 步，没有结论发生变化。",
    ),
    "steps moved": (
        "From {before:,} to {last:,} steps the verdict still changes for {names}.",
        "从 {before:,} 步到 {last:,} 步，{names} 的结论仍有变化。",
    ),
    "details rates": ("Learning-rate check", "学习率检查"),
    "details settings": ("Settings and machine", "设置与机器"),
    "details stronger": ("The stronger evidence: every length", "更强的证据：每个长度"),
    "stronger about": (
        "The preset `paper` on one {gpu}: {parameters} parameters, trained at {train}, {steps:,} steps, {seeds}. Its data are in "
        "docs/results/paper of the repository; rerun it with posenc compare --preset paper.",
        "一块 {gpu} 上的预设 paper：{parameters} 参数，训练长度 {train}，{steps:,} 步，{seeds}。数据在代码库的 docs/results/paper；"
        "可用 posenc compare --preset paper 重做。",
    ),
    "curves of": ("{task}: training loss", "{task}：训练损失"),
    "sliding title": ("{task}, sliding windows", "{task}，滑动窗口"),
    "cannot why": ("{encoding} cannot run at {size}: {reason}.", "{encoding} 在 {size} 处无法运行（原文）：{reason}。"),
    "sliding about": (
        "Sliding windows: only the last {stride} bytes of a window count, the same bytes at every length, each with a long "
        "context. A gain at longer lengths that is missing here comes from the first bytes of a window, which have little "
        "context.",
        "滑动窗口：每个窗口只计最后 {stride} 个字节，各长度下都是同样的字节，且都有很长的上文。"
        "若更长时的收益在这里消失，它就来自窗口开头缺少上文的字节。",
    ),
    "sliding hold": (
        "From {train} to {far} {names} keep their quality here.",
        "这里从 {train} 到 {far}，{names} 保持。",
    ),
    "sliding hold 1": (
        "From {train} to {far} {names} keeps its quality here.",
        "这里从 {train} 到 {far}，{names} 保持。",
    ),
    "sliding none": ("From {train} to {far} none keeps its quality here.", "这里从 {train} 到 {far}，没有一种保持。"),
    "sliding lose": ("Changes of the others: {names}.", "其余的变化：{names}。"),
    "parameters": ("parameters", "参数"),
    "of the encoding": ("of the encoding", "其中编码"),
    "tokens/s": ("tokens/s", "词元/秒"),
    "memory": ("peak memory, MB", "内存峰值（MB）"),
    "seconds": ("seconds", "秒"),
    "training": ("training", "训练"),
    "trained tick": ("{size} (trained)", "{size}（训练）"),
    "shared machine": (
        "Trials may have shared the machine: posenc compare --throughput compares speeds.",
        "各试验可能同时占用机器：比较速度请用 posenc compare --throughput。",
    ),
    "rates about": (
        "Score at the training size, first seed; * is the best, {lr:g} was used.",
        "训练规模下的得分，第一个种子；* 为最好，实际使用 {lr:g}。",
    ),
    "language": ("Language", "语言"),
    # ---- published tables
    "published": ("Compared with {title}", "与已发表结果比较：{title}"),
    "published about": (
        "Change of the loss from the training length, in nats per token there and nats per byte here: only the sign and "
        "the order can agree.",
        "相对训练长度的损失变化；原文单位是 nat/词元，这里是 nat/字节：只有符号和次序可以一致。",
    ),
    "length": ("length", "长度"),
    "published value": ("published", "发表"),
    "measured value": ("measured", "实测"),
    "agrees": ("agrees", "一致"),
    "not measured": ("not measured", "未测"),
    "disagrees": ("disagrees: published {theirs}, measured {ours}", "不一致：发表{theirs}，实测{ours}"),
    "published nothing": ("{title}: nothing was measured at its lengths.", "{title}：没有在其长度上测量。"),
    "published count": (
        "{title}: {agree} of {found} entries agree on whether an encoding holds or loses{others}.",
        "{title}：{found} 项中有 {agree} 项一致（保持还是变差）{others}。",
    ),
    "published others": ("; these do not: {names}", "；不一致的有：{names}"),
    "published entry": ("{encoding} at {size} ({outcome})", "{encoding} 在 {size}（{outcome}）"),
    "published same order": ("The order of the encodings is the same at every length.", "各长度下编码的次序都相同。"),
    "published other order": (
        "The order of the encodings differs at {count} of {lengths} lengths, best first: {orders}.",
        "在 {lengths} 个长度中，有 {count} 个长度的次序不同（从好到差）：{orders}。",
    ),
    "published order": ("at {size} {ours} (published {theirs})", "{size}：{ours}（发表：{theirs}）"),
    "published line": ("{title}; change of the loss, published / measured here", "{title}；损失的变化，发表/实测"),
    # ---- two runs
    "two runs": ("{a} and {b}", "{a} 与 {b}"),
    "differs setting": ("Differs: {line}", "不同：{line}"),
    "two values": ("{name} {a} and {b}", "{name}：{a} 与 {b}"),
    "differs": ("differs", "有差别"),
    "largest change": (
        "Largest difference: {encoding} on {task} at {size}: {a} in A, {b} in B.",
        "差别最大的：{encoding}，{task}，{size}：A 为 {a}，B 为 {b}。",
    ),
    "beyond": (
        "{count} of {total} results differ by more than both 95 % intervals.",
        "{total} 项结果中有 {count} 项的差别大于两者的 95% 置信区间之和。",
    ),
    "beyond unknown": (
        "A run with one seed has no intervals: small differences may be chance.",
        "只有一个种子的实验没有置信区间：小差别可能是偶然。",
    ),
    "nothing common": (
        "The runs have no (task, encoding, size) in common.",
        "两次实验没有共同的（任务、编码、规模）。",
    ),
    "every result": ("Every result", "全部结果"),
    # ---- the terminal
    "answer": ("Answer", "结论"),
    "trained to": ("{task}: {axis}; trained to {size}, {seeds}", "{task}：{axis}；训练：{size}，{seeds}"),
    "loading": ("posenc {command}: {what}; loading PyTorch …", "posenc {command}：{what}；正在加载 PyTorch …"),
    "what compare": ("preset {preset} to {out}", "预设 {preset}，输出到 {out}"),
    "what report": ("{runs}", "{runs}"),
    "trials": (
        "{left} of {number} trials to run with {jobs} processes; run the same command again to resume",
        "{number} 次试验中还有 {left} 次要运行，{jobs} 个进程；中断后再运行同一命令即可继续",
    ),
    "trials 1": (
        "{left} of {number} trials to run; run the same command again to resume",
        "{number} 次试验中还有 {left} 次要运行；中断后再运行同一命令即可继续",
    ),
    "trials 0": ("all {number} trials are finished", "{number} 次试验均已完成"),
    "starting": ("starting: the first steps follow in a few seconds", "正在启动：几秒后出现最初的训练步"),
    "left": ("{time} left", "还需 {time}"),
    "cannot run": ("cannot run", "无法运行"),
    "seed": ("seed {seed}", "种子 {seed}"),
    "written": ("Report: {path} (open it in a browser)", "报告：{path}（用浏览器打开）"),
    "stopped": (
        "stopped; run the same command again to resume (posenc report {out} shows the results so far)",
        "已停止；再运行同一命令即可继续（posenc report {out} 显示目前的结果）",
    ),
    "others kept": ("the other trials' results are in {path}", "其余试验的结果在 {path}"),
}

# titles of the presets that come with posenc; a preset of somebody else keeps its own
TITLES: dict[str, tuple[str, str]] = {
    "smoke": ("smoke: does it run", "smoke：能否运行（不是证据）"),
    "quick": ("quick: which encoding keeps working past the training length", "quick：哪种编码在训练长度之外仍然有效"),
    "paper": ("paper: trained at 512, tested to 16384", "paper：训练长度 512，测到 16384"),
    "full": ("full: every task", "full：所有任务"),
}


class Words:
    """words(key, **values): a sentence in one language."""

    def __init__(self, language: str = "en"):
        self.language = language
        self._column = list(LANGUAGES).index(language)

    def __call__(self, key: str, /, **values: object) -> str:
        return TEXTS[key][self._column].format(**values)

    def has(self, key: str) -> bool:
        return key in TEXTS

    def number_of(self, key: str, names: Sequence[str], **values: object) -> str:
        """The sentence about several names, or its form for one: the key with " 1"."""
        return self(f"{key} 1" if len(names) == 1 else key, names=self.names(names), **values)

    def names(self, names: Sequence[str], between: str = "and") -> str:
        """a, b and c."""
        if len(names) < 2:
            return "".join(names)
        return self("comma").join(names[:-1]) + self(between) + names[-1]

    def join(self, *sentences: str) -> str:
        return self("space").join(sentence for sentence in sentences if sentence)

    def title(self, title: str) -> str:
        known = next((both for both in TITLES.values() if both[0] == title), None)
        return known[self._column] if known else title
