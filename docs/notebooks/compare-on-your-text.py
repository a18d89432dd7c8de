# %% [markdown]
# # Compare encodings on your text
#
# Train small transformers that differ in their encoding only, and test them past their training length. Here with very few
# steps, so that it runs in a minute on one core: enough to see how it works, not enough for a verdict.
# ---
# # 在自己的文本上比较编码
#
# 训练只有位置编码不同的小型 transformer，并在超过训练长度处测试。这里步数很少，一个核一分钟就能跑完：足以说明用法，不足以下结论。

# %%
import tempfile
from pathlib import Path

from posenc.cli.main import main
from posenc.lab import results, verdict

folder = Path(tempfile.mkdtemp())
text = folder / "text.txt"
text.write_text("".join(f"{n} plus {n + 1} is {2 * n + 1}. " for n in range(4000)))  # put your own text here

# %% [markdown]
# A preset is a TOML file; every field has a name that says what it is.
# ---
# 预设是一个 TOML 文件；每个字段的名字都说明了它是什么。

# %%
preset = folder / "mine.toml"
preset.write_text(
    """
title = "mine: sums in words"
device = "cpu"

[[tasks]]
task = "text"
train = 32
test = [32, 64, 128]
encodings = ["sinusoidal", "rope", "alibi"]
seeds = 1
steps = 40
batch = 16
width = 48
heads = 4
layers = 2
lr = 0.004
count = 1024
"""
)
code = main(["compare", "--preset", str(preset), "--text", str(text), "--out", str(folder / "run"), "--jobs", "1"])
print("exit code", code)

# %% [markdown]
# ## The results
#
# The folder has `report.html`, a page that opens without a network, and `results.json`, which is read here.
# ---
# ## 结果
#
# 文件夹里有不用网络就能打开的 `report.html`，以及这里读取的 `results.json`。

# %%
found = results.read(folder / "run")
task = found.tasks()[0]
for standing in verdict.standings(found, task):
    here = "–" if standing.here is None else f"{standing.here.value:.2f}"
    far = "–" if standing.far is None else f"{standing.far.value:.2f}"
    print(f"{standing.encoding:12} {here} -> {far}  {standing.outcome}")

# %% [markdown]
# ## The real thing
#
# `posenc compare --preset quick --text your.txt` takes five minutes on two cores; `--preset paper` is for a GPU. Use several seeds
# before you believe a difference of a few hundredths.
# ---
# ## 正式的比较
#
# `posenc compare --preset quick --text your.txt` 在两个核上要五分钟；`--preset paper` 用于 GPU。相差百分之几的结果，要用几个随机种子才能相信。
