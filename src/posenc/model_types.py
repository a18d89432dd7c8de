"""What model types of transformers 5.22 say in their code and not in their files. The tests read that code."""

INTERLEAVED = frozenset((
    "axk1", "axk2", "bailing_hybrid", "blt", "codegen", "cohere", "cohere2", "cohere2_moe", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text", "glm", "glm4",
    "glm4_moe_lite", "glm4v_text", "glm_moe_dsa", "glm_ocr_text", "gptj", "helium", "llama4_text", "longcat_flash",
    "mistral4", "mistral_large4", "moonshine", "moonshine_streaming", "roformer", "youtu",
))  # fmt: skip
"""Model types whose code in transformers 5.22 turns neighbouring channels; all others there turn halves."""

BASES: dict[str, float] = {
    "apertus": 12000000.0, "bitnet": 500000.0, "blt_local_encoder": 500000.0, "blt_local_decoder": 500000.0,
    "blt_global_transformer": 500000.0, "blt": 500000.0, "cohere": 500000.0, "cosmos3_edge_text": 100000000.0,
    "csm_depth_decoder_model": 500000.0, "csm": 500000.0, "cwm": 1000000.0, "emu3_text_model": 1000000.0,
    "ernie4_5": 500000.0, "ernie4_5_moe": 500000.0, "ernie4_5_vl_moe_text": 500000.0, "evolla": 500000.0,
    "flex_olmo": 500000.0, "gpt_oss": 150000.0, "gte": 160000.0, "helium": 100000.0, "hy_v3": 11158840.0,
    "jina_embeddings_v3": 20000.0, "lfm2": 1000000.0, "lfm2_moe": 1000000.0, "llama4_text": 500000.0,
    "longcat_flash": 10000000.0, "minimax": 1000000.0, "minimax_m2": 5000000.0, "minimax_m3_vl_text": 5000000.0,
    "mixtral": 1000000.0, "mllama_text_model": 500000.0, "muse_glimmer_assistant": 500000.0, "musicflamingo": 1200.0,
    "nomic_bert": 1000.0, "openai_privacy_filter": 150000.0, "paddleocr_vl_text": 500000.0,
    "pe_audio_encoder": 20000.0, "pe_audio_video_encoder": 20000.0, "pe_video_encoder": 20000.0, "phimoe": 1000000.0,
    "qwen2_5_omni_text": 1000000.0, "qwen2_5_omni_talker": 1000000.0, "qwen2_5_vl_text": 1000000.0,
    "qwen2_vl_text": 1000000.0, "qwen3_omni_moe_text": 1000000.0, "qwen3_vl_text": 500000.0,
    "qwen3_vl_moe_text": 500000.0, "smollm3": 2000000.0, "solar_open": 1000000.0,
}  # fmt: skip
"""The base where a file does not give one, for the types where that is not 10000."""

LAYERED: dict[str, dict[str, float]] = {
    "gemma3_text": {"full_attention": 1000000.0, "sliding_attention": 10000.0},
    "gemma3n_text": {"full_attention": 1000000.0, "sliding_attention": 10000.0},
    "modernbert": {"full_attention": 160000.0, "sliding_attention": 10000.0},
    "modernbert-decoder": {"full_attention": 160000.0, "sliding_attention": 10000.0},
    "t5gemma2_text": {"full_attention": 1000000.0, "sliding_attention": 10000.0},
    "t5gemma2_decoder": {"full_attention": 1000000.0, "sliding_attention": 10000.0},
    "olmo3": {"full_attention": 500000.0, "sliding_attention": 500000.0},
}
"""Bases of the two types of layers, where a file gives none or one rotation only."""

BY_LAYER = frozenset((
    "beam", "deepseek_v4", "diffusion_gemma_text", "embedding_gemma2_text", "gemma4_text", "gemma4_unified_text",
    "laguna", "mellum", "mimo_v2_flash", "neomme", "step3p5", "ultrabert", "zaya",
))  # fmt: skip
"""Types with a rotation for each type of layer that only a new file, or their class, says."""

KEYLESS = frozenset(("llama", "falcon", "gpt_neox", *INTERLEAVED, *BASES, *LAYERED, *BY_LAYER))
"""Types that rotate even where their file has no key of it: the first files of Llama and Falcon, and those above."""
