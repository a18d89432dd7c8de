"""Tiny models of every model type that transformers has, as they are and accelerated: a randomised exam of `posenc.hf`.

    python -m tests.fuzz.zoo --seed 1 --count 500 [--only llama,t5]

Each draw takes a model type and one of its classes, sizes (odd heads, grouped queries), a way of use (outputs, gradients, generate,
copies, saving, halves, ...), padding and lengths, and compares the accelerated model with the original under "eager" or "sdpa". What
the original does not run is refused, and counted. Models are made from configurations by the names of their fields, so that a
release that nobody has seen is examined as well.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

from posenc import hf
from posenc.hf import rules

LIMIT = 3_000_000
"""Parameters of a model that is tiny."""
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)  # fmt: skip
USES = (
    "outputs", "outputs", "gradients", "gradients", "generate", "generate", "beams", "static", "no cache", "embeddings", "attentions",
    "copy", "pickle", "save", "twice", "restore", "half", "bfloat16", "checkpointing", "train", "name", "chunks", "construct", "hidden states",
)  # fmt: skip


@contextlib.contextmanager
def engines_for_every_length(forced: bool):
    """Without the rules that keep short texts on a CPU with PyTorch's attention or the original."""
    before = {name: getattr(rules, name) for name in rules.NUMBERS}
    for name, value in before.items() if forced else ():
        setattr(rules, name, dict.fromkeys(value, 0) if isinstance(value, dict) else 0)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(rules, name, value)


class Refused(Exception):
    """The original does not do it either."""


def sizes(draw: random.Random) -> dict[str, Any]:
    """Field of a configuration -> value, for every name that models have for it."""
    heads, head = draw.choice((1, 2, 3, 4)), draw.choice((4, 8, 12, 16))
    kv = draw.choice([n for n in (1, 2, 3, 4) if heads % n == 0])
    layers, width = draw.choice((1, 2, 3)), heads * head
    names: dict[str, Any] = {}
    for value, text in (
        (width, "hidden_size d_model n_embd embed_dim dim hidden_dim encoder_embed_dim decoder_embed_dim projection_dim emb_dim "
                "decoder_hidden_size vision_hidden_size text_hidden_size embedding_size d_embed out_hidden_size"),
        (layers, "num_hidden_layers n_layer num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers n_layers "
                 "depth speech_encoder_layers text_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers"),
        (heads, "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads "
                "speech_encoder_attention_heads swa_num_attention_heads encoder_num_attention_heads decoder_num_attention_heads"),
        (kv, "num_key_value_heads n_kv_heads num_kv_heads swa_num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads"),
        (head, "head_dim d_kv kv_channels attention_head_size swa_head_dim d_head"),
        (24, "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner moe_intermediate_size ffn_hidden_size d_inner "
             "shared_expert_intermediate_size expert_intermediate_size mlp_hidden_size speech_encoder_intermediate_size"),
        (61, "vocab_size unpadded_vocab_size text_vocab_size"),
        (256, "max_position_embeddings n_positions max_seq_len max_source_positions max_target_positions n_ctx"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token top_k moe_top_k moe_topk n_shared_experts type_vocab_size expert_num"),
        (1, "n_group topk_group num_nextn_predict_layers first_k_dense_replace moe_k"),
        (8, "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim o_lora_rank index_head_dim d_rel rope_head_dim"),
        (2, "index_n_heads o_groups"), (16, "index_topk"), (4, "rotary_dim"),
        (draw.choice((3, 7, 20)), "sliding_window sliding_window_size attention_window local_attention local_window_size"),
        (8, "mamba_d_state ssm_state_size state_size mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim"),
        (2, "mamba_n_heads mamba_num_heads linear_num_key_heads linear_num_value_heads mamba_expand"),
        (24, "image_size"), (8, "patch_size"), (0.0, "layerdrop encoder_layerdrop decoder_layerdrop drop_path_rate"),
        (0, "pad_token_id"), (1, "bos_token_id decoder_start_token_id"), (2, "eos_token_id"),
    ):  # fmt: skip
        names |= dict.fromkeys(text.split(), value)
    return names


LISTS = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "attn_layer_indices",
    "no_rope_layers",
    "block_types",
    "layer_type_list",
)


def shrink(config: Any, names: dict[str, Any], found: dict[str, Any] | None = None) -> dict[str, Any]:
    """The arguments of a configuration class that make its models tiny."""
    given: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name in (getattr(config, "sub_configs", None) or {}) and hasattr(value, "to_dict"):
            given[name] = shrink(value, names)
            if "model_type" in value.to_dict():
                given[name]["model_type"] = value.model_type
        elif name in names and (value is None or isinstance(value, (int, float))) and not isinstance(value, bool):
            if value is not None or name in (
                "num_key_value_heads",
                "head_dim",
                "pad_token_id",
                "bos_token_id",
                "eos_token_id",
            ):
                given[name] = names[name]
        elif name in LISTS and isinstance(value, list):
            given[name] = None
    return given


def make(model_type: str, name: str, draw: random.Random) -> torch.nn.Module:
    names = sizes(draw)
    try:
        kind = configuration_auto.CONFIG_MAPPING[model_type]
        config = kind(**shrink(kind(), names))
        cls = getattr(transformers, name)
        config._attn_implementation = None
        with torch.device("meta"):
            count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
        if count > LIMIT:
            raise Refused(f"{count} parameters")
        model = cls(config)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"not made: {type(error).__name__} {str(error)[:100]}") from error
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point() and parameter.numel():
                torch.nn.init.normal_(parameter, std=0.7 / parameter.shape[-1] ** 0.5)
    return model.float().eval()


def inputs_of(model: Any, draw: random.Random, generating: bool) -> dict[str, Any]:
    rows, length = draw.choice((1, 2, 3)), draw.choice((1, 2, 3, 7, 16, 17, 33, 40, 170))
    if generating:
        length = max(length, 2)
    main = model.main_input_name
    if main == "pixel_values":
        vision = getattr(model.config, "vision_config", model.config)
        side = getattr(vision, "image_size", 24)
        side = side if isinstance(side, int) else 24
        return {"pixel_values": torch.randn(rows, getattr(vision, "num_channels", 3), side, side)}
    if main == "input_values":
        return {"input_values": torch.randn(rows, draw.choice((800, 1300)))}
    if main != "input_ids":
        raise Refused(f"inputs are {main}")
    ids = torch.randint(3, 60, (rows, length))
    given = {"input_ids": ids}
    padding = (
        draw.choice(("none", "none", "left", "right", "holes")) if not generating else draw.choice(("none", "left"))
    )
    if padding != "none":
        mask = torch.ones_like(ids)
        for row in range(rows):
            cut = draw.randrange(length)
            if padding == "left":
                mask[row, :cut] = 0
            elif padding == "right":
                mask[row, length - cut :] = 0
            else:
                mask[row, 1::3] = 0
        given["attention_mask"] = mask
    if model.config.is_encoder_decoder and not generating:
        given["decoder_input_ids"] = torch.randint(3, 60, (rows, draw.choice((1, 2, 9))))
    return given


def first(output: Any) -> torch.Tensor:
    found = (
        output if isinstance(output, torch.Tensor) else (output if isinstance(output, tuple) else output.to_tuple())[0]
    )
    if not isinstance(found, torch.Tensor) or not found.is_floating_point():
        raise Refused("no tensor comes first")
    return found


def real(output: Any, given: dict[str, Any]) -> torch.Tensor:
    found, mask = first(output), given.get("attention_mask")
    if mask is not None and "decoder_input_ids" not in given and found.shape[:2] == mask.shape:
        real_tokens = mask.bool()
        if not mask[:, 0].all():  # a causal query before the first real token sees nothing
            real_tokens = real_tokens & (mask.cumsum(1) > 0)
        found = found[real_tokens]
    return found


def gradients(model: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = real(model(**given), given)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out.float() * weights).sum().backward()
    return {"output": out.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def tokens(model: Any, given: dict[str, Any], **options: Any) -> torch.Tensor:
    if not model.can_generate():
        raise Refused("does not generate")
    torch.manual_seed(0)
    return model.generate(
        **given, max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )  # fmt: skip


def run(model: Any, given: dict[str, Any], use: str) -> dict[str, torch.Tensor]:
    """Numbers of this use, by name."""
    torch.manual_seed(0)  # some models draw what they mask
    if use in ("gradients", "checkpointing"):
        return gradients(model, given)
    if use in ("generate", "beams", "static", "no cache"):
        options = {
            "generate": {}, "beams": dict(num_beams=2), "static": dict(cache_implementation="static", disable_compile=True),
            "no cache": dict(use_cache=False),
        }[use]  # fmt: skip
        found = tokens(model, given, **options)
        if use == "beams":
            return {"tokens": found.sequences.double()}
        return {"tokens": found.sequences.double(), "logits": torch.stack(found.logits)}
    with torch.no_grad():
        if use == "embeddings":
            table = model.get_input_embeddings()
            other = {n: x for n, x in given.items() if n != "input_ids"}
            return {"output": real(model(inputs_embeds=table(given["input_ids"]), **other), given)}
        if use == "attentions":
            out = model(**given, output_attentions=True)
            maps = [x for x in (getattr(out, "attentions", None) or ()) if isinstance(x, torch.Tensor)]
            return {"output": real(out, given)} | (
                {f"map {i}": x for i, x in enumerate(maps)} if "attention_mask" not in given else {}
            )
        if use == "hidden states":
            found = model(**given, output_hidden_states=True)
            every = [x for x in (getattr(found, "hidden_states", None) or ()) if isinstance(x, torch.Tensor)]
            mask = given.get("attention_mask")
            every = [
                x if mask is None or x.shape[:2] != mask.shape else x[mask.bool() & (mask.cumsum(1) > 0)] for x in every
            ]
            return {"output": real(found, given)} | {f"map {i}": x for i, x in enumerate(every)}
        if use == "chunks":
            if model.config.is_encoder_decoder or given["input_ids"].shape[1] < 3:
                raise Refused("no chunks")
            ids, mask = given["input_ids"], given.get("attention_mask")
            cut = ids.shape[1] // 2
            start = model(
                input_ids=ids[:, :cut], attention_mask=None if mask is None else mask[:, :cut], use_cache=True
            )
            if getattr(start, "past_key_values", None) is None:
                raise Refused("no cache")
            end = model(
                input_ids=ids[:, cut:], attention_mask=mask, past_key_values=start.past_key_values, use_cache=True
            )
            found = first(end)
            return {"output": found if mask is None else found[mask[:, cut:].bool() & (mask.cumsum(1)[:, cut:] > 0)]}
        return {"output": real(model(**given), given)}


def checkpoint(model: Any) -> None:
    """Training with recomputed layers, without dropout."""
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        for one in (module, getattr(module, "config", None)):
            for name, value in list(vars(one).items()) if one is not None else ():
                if isinstance(value, float) and (
                    "drop" in name or (name == "p" and isinstance(module, torch.nn.Dropout))
                ):
                    vars(one)[name] = 0.0


def saved(model: Any) -> Any:
    """Saved and loaded."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).float().eval()


def worst(ours: dict, theirs: dict) -> tuple[float, str]:
    """The largest difference relative to the largest number of its kind, and where."""
    if ours.keys() != theirs.keys():
        return float("inf"), f"others: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    found, where = 0.0, ""
    grads = [
        x.float().abs().max().item() for n, x in theirs.items() if n not in ("output", "tokens", "logits") and x.numel()
    ]
    largest = max(grads, default=0.0)
    for name, wanted in theirs.items():
        if ours[name].shape != wanted.shape:
            return float("inf"), f"{name} is {list(ours[name].shape)}, not {list(wanted.shape)}"
        if not wanted.numel():
            continue
        good = wanted.isfinite() & (wanted.float() > -1e30)
        if not good.any():
            continue
        size = wanted[good].float().abs().max().item()
        size = max(
            size,
            1e-3,
            0.1 * largest if name not in ("output", "tokens", "logits") and not name.startswith("map") else 0.0,
        )
        off = (ours[name].float() - wanted.float())[good].abs().max().item() / size
        if not off <= found:
            found, where = off, name
    return found, where


def examine(model_type: str, name: str, seed: int) -> str:
    """What happened; raises Refused. A text that begins with FAULT is one."""
    draw = random.Random(f"{model_type} {name} {seed}")
    torch.manual_seed(draw.randrange(2**31))
    use = draw.choice(USES)
    model = make(model_type, name, draw)
    given = inputs_of(model, draw, use in ("generate", "beams", "static", "no cache"))
    if use in ("embeddings", "chunks") and "input_ids" not in given:
        raise Refused("no tokens")
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16}.get(use)
    how = {n: list(x.shape) for n, x in given.items()} | (
        {"mask": given["attention_mask"].tolist()} if "attention_mask" in given else {}
    )
    candidates, reason = [], f"the original, {use}: NaN"
    for implementation in ("eager", "sdpa"):
        other = copy.deepcopy(model)
        try:
            other.set_attn_implementation(implementation)
            if use == "checkpointing":
                checkpoint(other)
            elif use == "save":
                other = saved(other)
            if dtype is not None:
                truth = run(other, given, use)
                other = other.to(dtype)
                low = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
                candidates.append((run(other, low, use), truth))
            else:
                candidates.append((run(other, copy.deepcopy(given), use), None))
        except Refused:
            raise
        except Exception as error:
            reason = f"the original, {use}: {type(error).__name__} {str(error)[:100]}"
    candidates = [one for one in candidates if not any(x.isnan().any() for x in one[0].values())]
    if not candidates:
        raise Refused(reason)
    ours = copy.deepcopy(model)
    try:
        if use == "name":
            ours.set_attn_implementation("posenc")
        elif use == "construct":
            config = copy.deepcopy(model.config)
            ours = type(model)._from_config(config, attn_implementation="posenc").float().eval()
            ours.load_state_dict(model.state_dict())
        else:
            hf.accelerate(ours)
    except hf.UnsupportedModel as error:
        raise Refused(f"unsupported: {str(error)[:140]}") from error
    if use == "train":  # dropout is on: another draw of it, the same shapes, finite
        run(ours.train(), given, "outputs")
        ours.eval()
    elif use == "twice":
        hf.accelerate(ours)
    elif use == "restore":
        hf.restore(hf.restore(ours))
        left = [n for m in ours.modules() for n in vars(m) if n.startswith("posenc")]
        if left or hf.report(ours).layers:
            return f"FAULT {use}: left {left[:3]}"
        hf.accelerate(ours)
    elif use == "copy":
        ours = copy.deepcopy(ours)
    elif use == "pickle":
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        ours = torch.load(file, weights_only=False)
    elif use == "save":
        ours = hf.accelerate(saved(ours))
    elif use == "checkpointing":
        checkpoint(ours)
    if dtype is not None:
        ours = ours.to(dtype)
        given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
    forced = draw.random() < 0.5
    with engines_for_every_length(forced):
        found = run(ours, given, use)
    best = (float("inf"), "")
    for wanted, truth in candidates:
        off, where = worst(found, wanted)
        if truth is not None:  # twice the original's own error
            theirs = max(worst(wanted, truth)[0], 2e-3 if dtype is torch.float16 else 1e-2)
            off, where = worst(found, truth)
            off, where = off / (2 * theirs) * 2e-4, where
        best = min(best, (off, where))
    limit = 1e-3 if use in ("gradients", "checkpointing") else 2e-4
    text = f"{use}{', engines' if forced else ''}, off by {best[0]:.1e} at {best[1]}"
    return text if best[0] <= limit else f"FAULT {text}; {how}"


def kinds(only: list[str]) -> list[tuple[str, str]]:
    found = []
    for mapping in MAPPINGS:
        for model_type, name in getattr(modeling_auto, mapping, {}).items():
            for one in name if isinstance(name, (tuple, list)) else (name,):
                if hasattr(transformers, one) and (not only or model_type in only):
                    found.append((model_type, one))
    return sorted(set(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", default="")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--at", type=int, nargs="*", help="these draws alone")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    every, counts = kinds(given.only.split(",") if given.only else []), Counter()
    reasons: Counter[str] = Counter()
    start = time.perf_counter()
    for number in given.at or range(given.count):
        draw = random.Random(f"{given.seed} {number}")
        model_type, name = draw.choice(every)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                text = examine(model_type, name, draw.randrange(2**31))
        except Refused as error:
            counts["refused"] += 1
            reasons[f"{name}: {error}"] += 1
            text = f"refused {error}"
        except Exception as error:
            text = f"FAULT raised {type(error).__name__}: {str(error)[:300]}"
            if given.verbose:
                import traceback

                traceback.print_exc()
        counts["FAULT" if text.startswith("FAULT") else "right" if not text.startswith("refused") else "-"] += 1
        if given.verbose or text.startswith("FAULT"):
            print(number, name, text, flush=True)
    print(
        dict(counts),
        f"{time.perf_counter() - start:.0f} s",
        f"transformers {transformers.__version__}",
        file=sys.stderr,
    )
    if given.verbose:
        for reason, times in reasons.most_common():
            print(times, reason)


if __name__ == "__main__":
    main()
