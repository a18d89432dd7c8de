# %% [markdown]
# # Extend a model
#
# Give a Llama-like model four times its context, look at what that does to its rotation, and check that decoding still equals
# reading at once. A tiny random model stands for yours: `from_pretrained` works the same way.
# ---
# # 扩展一个模型
#
# 把类 Llama 模型的上下文扩大到四倍，看看它的旋转发生了什么变化，并验证解码仍等于一次读完。这里用一个随机的小模型；换成 `from_pretrained` 也一样。

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import posenc
from posenc import hf, scaling

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()
print(model.config.max_position_embeddings, "tokens")

# %% [markdown]
# ## Which pairs are the problem?
#
# A pair of channels that has not completed a rotation within the trained length meets new angles beyond it.
# ---
# ## 问题出在哪些对？
#
# 在训练长度之内没有转满一圈的通道对，超过训练长度就会遇到新的角度。

# %%
posenc.plot.wavelengths(head_dim=64, original=4096)

# %% [markdown]
# ## Extend
#
# The model changes, and its configuration with it, in transformers' own format.
# ---
# ## 扩展
#
# 模型变了，配置也随之改变，用的是 transformers 自己的写法。

# %%
hf.extend(model, scaling.YaRN(factor=4, original=64))
print(model.config.max_position_embeddings, "tokens;", model.config.rope_parameters)

# %% [markdown]
# ## Check
#
# Generating with a cache gives the same logits as one forward pass over the whole text.
# ---
# ## 检查
#
# 用缓存生成时的 logits，与对整段文本一次前向计算的相同。

# %%
ids = torch.randint(2, 100, (1, 150))
with torch.no_grad():
    whole = model(ids).logits[:, -1]
    cache = model(ids[:, :100]).past_key_values
    for t in range(100, 150):
        step = model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1]
print("largest difference:", f"{(step - whole).abs().max():.0e}" if not torch.equal(step, whole) else "0")

# %% [markdown]
# ## Choose between scalings
#
# How much of its frequency does each pair keep?
# ---
# ## 在几种缩放之间选择
#
# 每一对保留了多少频率？

# %%
plain = scaling.frequencies(64, 10000.0)
for name, one in {
    "linear": scaling.Linear(factor=4),
    "NTK": scaling.NTK(factor=4),
    "YaRN": scaling.YaRN(factor=4, original=4096),
    "Llama 3": scaling.Llama3(factor=4, original=4096),
}.items():
    kept = [n / p for n, p in zip(scaling.frequencies(64, 10000.0, one), plain, strict=True)]
    print(f"{name:8} fastest {kept[0]:.2f}  middle {kept[16]:.2f}  slowest {kept[-1]:.2f}")

# %% [markdown]
# ## Then
#
# Fine-tune on texts of the new length, save, and load with transformers alone. Measure retrieval from far away, not only the loss:
# chapter 12 of the course says why.
# ---
# ## 然后
#
# 用新长度的文本微调，保存，只用 transformers 就能载入。要测远处的检索，不只是损失：原因见教程第 12 章。
