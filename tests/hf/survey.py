"""Every folder of transformers.models: which add a positional term inside attention, and what posenc.hf does about it.

    python -m tests.hf.survey > docs/hf-survey.md

`TERMS` was written by reading the models; `find_terms` searches the installed sources for what such terms are made of, so that a
test notices a folder that nobody has read.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from posenc.hf.family import FOLDERS

SINKS = "attention sinks, through the interface"
REFUSED = "refused: "
"""No plan and no compact bias expresses it, or it would gain nothing."""

TERMS = {
    **dict.fromkeys(
        ("gpt_oss", "flint", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "openai_privacy_filter", "hy_v4", "deepseek_v4"),
        SINKS,
    ),
    "phi4_multimodal": REFUSED + "the table of its audio encoder is read once for all layers, and reaches the interface as a mask, "
    "in chunks of 500 frames: nothing to gain",
    "prophetnet": REFUSED + "each predicted stream has buckets and scores of its own",
    "funnel": REFUSED + "pooled queries have another stride than the keys, so that no distance names a pair",
    "bros": REFUSED + "each pair of boxes has a vector of its own, which the queries multiply",
    "lilt": REFUSED + "two streams add up their scores, which needs both at once",
    "dinat": REFUSED + "its neighbourhoods are computed by another library's kernels, the bias included",
    "sam3": REFUSED + "its decoder's bias depends on the boxes that the layer before has predicted",
    "sam3_lite_text": REFUSED + "as sam3",
    "esm": REFUSED + "ESMFold's pair representation is no function of positions",
    "esmfold2": REFUSED + "as ESMFold's",
    "levit": REFUSED + "it keeps its biases itself when it does not train",
    "granite_speech": REFUSED + "blocks of 200 frames: their terms are small",
    "granite_speech5": REFUSED + "as granite_speech",
    "granite_speech_plus": REFUSED + "as granite_speech",
    "gemma3n": REFUSED + "its audio encoder looks at some 25 frames at a time",
    "gemma4": REFUSED + "as gemma3n",
    "rwkv": REFUSED + "no softmax attention: its decay belongs to a recurrence",
    "minimax": REFUSED + "its decays belong to linear attention; the other layers are rotary",
    "grounding_dino": "nothing to do of its own: its Swin backbone is done",
    "mm_grounding_dino": "nothing to do of its own: its Swin backbone is done",
    "pp_doclayout_v3": "nothing to do: the names are left over from pp_doclayout_v2's checkpoints",
}  # fmt: skip
"""Folder -> what is done about its term; the folders of `FOLDERS` are done."""

SIGNS = (
    "relative_position_bias", "relative_position_bucket", "rel_pos_bias", "rel_pos_h", "build_alibi", "build_mpt_alibi",
    "module.sinks", "attention_bias_idxs", "relative_attention_bias", "distance_embedding", "pos_bias_u", "bias_u",
    "rel_attn_embed", "_rel_shift", ".rpb", "rpb_embed", "rel_pos_emb", "relative_buckets", "rel_att ", "emb_rel_k",
    "relative_positional_attention", "bbox_pos_scores", "tmp_layout_attention_scores", "relative_position_embedding",
    "RelativePositionEncoding", "time_decay", "slope_rate", "rel_logits_proj", "continuous_position_bias", "r_head_bias", "r_r_bias",
    "RelativeLogits", "relative_position_index", "EsmFoldRelativePosition", "RelativePositionBias",
)  # fmt: skip
"""What such terms are called."""
ROTARY = ("apply_rotary", "rotary_emb", "RotaryEmbedding", "rotate_half", "freqs_cis")


def models_folder() -> Path:
    import transformers

    return Path(transformers.__file__).parent / "models"


@cache
def sources() -> dict[str, str]:
    """Folder -> the text of its modeling files."""
    found: dict[str, str] = {}
    for path in sorted(models_folder().glob("*/modeling_*.py")):
        found[path.parent.name] = found.get(path.parent.name, "") + path.read_text(encoding="utf-8")
    return found


def find_terms() -> set[str]:
    """Folders whose source names something that such terms are made of."""
    return {folder for folder, text in sources().items() if any(sign in text for sign in SIGNS)}


def page() -> str:
    """The page of the documentation, in Markdown."""
    import transformers

    texts = sources()
    done = {folder: f"done (`hf/{name}.py`)" for folder, name in FOLDERS.items()}
    known = {**done, **TERMS}
    unknown = {folder: text for folder, text in texts.items() if folder not in known}
    rotary = sorted(folder for folder, text in unknown.items() if any(sign in text for sign in ROTARY))
    others = sorted(unknown.keys() - set(rotary))
    calls = {folder for folder, text in texts.items() if "ALL_ATTENTION_FUNCTIONS" in text}
    terms = [folder for folder in sorted(known) if folder in texts]
    rows = "\n".join(f"| {folder} | {known[folder]} | {'yes' if folder in calls else 'no'} |" for folder in terms)
    return f"""\
# Positional terms inside attention, model by model

All {len(texts)} folders of transformers {transformers.__version__} that have modeling code, by
`python -m tests.hf.survey`. *Refused* gives the reason.

## A term inside attention ({len(terms)})

| folder | posenc.hf | calls the interface |
| --- | --- | --- |
{rows}

## Rotary positions before attention ({len(rotary)})

Nothing to do: queries and keys arrive rotated. Those that call the interface run on it; `hf.extend` changes the rotation.

{", ".join(rotary)}

## Positions at the input, or none ({len(others)})

Nothing to do; those that call the interface run on it.

{", ".join(others)}
"""


if __name__ == "__main__":
    print(page(), end="")
