# %% [markdown]
# # See an encoding
#
# What does a positional encoding do to attention? This notebook looks at one from four sides: its vectors, its effect on
# scores, its effect over distance, and a layer's scores split into content and position.
# ---
# # 看一种编码
#
# 位置编码对注意力做了什么？这个笔记本从四个方面来看：它的向量、它对分数的作用、它随距离的作用，以及一层的分数怎样分成内容和位置两部分。

# %%
import torch

import posenc

print(posenc.list_encodings())

# %% [markdown]
# ## Its facts
#
# `posenc.info` knows what `posenc show` prints.
# ---
# ## 概要
#
# `posenc show` 打印的内容，`posenc.info` 都知道。

# %%
info = posenc.info("t5")
print(info.formula)
print(info.extrapolates, "|", info.used_by)

# %% [markdown]
# ## Its table and its buckets
#
# A table that was never trained is random; the *buckets* are what T5 fixes: which distances share a number.
# ---
# ## 表和桶
#
# 未训练的表是随机的；T5 固定下来的是*桶*：哪些距离共用一个数。

# %%
posenc.plot.buckets("t5")

# %% [markdown]
# ## What it does to scores
#
# With equal content at every position, what remains is position. T5 has stripes: only the distance counts. Learned
# positions have none.
# ---
# ## 它对分数的作用
#
# 让每个位置的内容相同，剩下的就是位置。T5 是条纹：只有距离起作用。可学习的位置没有条纹。

# %%
posenc.plot.kernel("t5", length=64)

# %%
posenc.plot.kernel("learned", length=64)

# %% [markdown]
# ## Over distance
#
# Four heads of ALiBi, and RoPE, where all heads agree.
# ---
# ## 随距离
#
# ALiBi 的四个头；以及 RoPE，它的各个头都一样。

# %%
posenc.plot.distance("alibi", reach=64)

# %%
posenc.plot.distance("rope", reach=64)

# %% [markdown]
# ## Content and position in one layer
#
# The scores of a layer are a sum; here are its terms on one colour scale.
# ---
# ## 一层中的内容与位置
#
# 一层的分数是几项之和；这里用同一色标画出各项。

# %%
torch.manual_seed(0)
words = ["the", "dog", "bites", "the", "man"]
layer = posenc.Attention(64, 4, encoding="deberta")
posenc.plot.decomposition(layer, torch.randn(1, len(words), 64), labels=words)

# %% [markdown]
# ## Your turn
#
# Change the names above. `posenc.plot.overview(NAME)` draws the most telling panels of any encoding.
# ---
# ## 轮到你了
#
# 换掉上面的名称。`posenc.plot.overview(NAME)` 画出任何一种编码最有代表性的几幅图。

# %%
posenc.plot.overview("shaw", max_distance=8)
