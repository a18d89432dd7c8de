"""Defaults that transformers 5.22 defines in the code of a model type and not in its configuration. Tests compare with that code."""

INTERLEAVED = frozenset((
    "axk1", "axk2", "bailing_hybrid", "blt", "codegen", "cohere", "cohere2", "cohere2_moe", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text", "glm", "glm4",
    "glm4_moe_lite", "glm4v_text", "glm_moe_dsa", "glm_ocr_text", "gptj", "helium", "llama4_text", "longcat_flash",
    "mistral4", "mistral_large4", "moonshine", "moonshine_streaming", "roformer", "youtu",
))  # fmt: skip
"""Model types whose code in transformers 5.22 rotates neighbouring channels; all others rotate halves."""

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
"""Types with a rotation for each type of layer that only a new file, or their class, defines."""

OTHERS = frozenset((
    "falcon", "gpt_neox", "llama",
    "afmoe", "arcee", "aria_text", "bamba", "blt_patcher", "chameleon", "cohere_compass_text",
    "cohere_compass_vision", "dbrx", "deepseek_ocr2_encoder", "deepseek_ocr2_text", "dia_decoder", "dia_encoder",
    "diffllama", "doge", "dots1", "edgetam_video", "efficientloftr", "eomt_dinov3", "ernie4_5_vl_moe_vision",
    "esmc", "eurobert", "exaone4", "exaone4_5_vision", "exaone_moe", "falcon_h1", "flint", "gemma", "gemma2",
    "gemma4_vision", "glm4_moe", "glm4v_moe_text", "glm4v_moe_vision", "glm4v_vision", "glm5_next_vision",
    "glm_image_text", "glm_ocr_vision", "glmasr_encoder", "gpt_neox_japanese", "gradium_phonon_tts", "granite",
    "granite4_vision_text", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "higgs_audio_v2", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "hy_v4", "hyperclovax",
    "idefics", "jais2", "jetmoe", "kimi_k25_vision", "kolibri1", "kyutai_speech_to_text", "lasr_encoder",
    "llama4_vision_model", "mimi", "mimi_decoder", "mimi_encoder", "minicpm3", "minimax_m3_vl_vision",
    "ministral", "ministral3", "mistral", "mistral_large4_text", "mlcd_vision_model", "molmo2_text", "moshi",
    "muse_glimmer_text", "muse_glimmer_vision", "muse_spark_text", "muse_spark_vision", "nanochat", "nemotron",
    "nemotron3_5_transcribe_asr_audio", "nemotron3_5_transcribe_word_timestamp", "nemotron3_diarization_audio",
    "neucodec", "olmo", "olmo2", "olmo_hybrid", "olmoe", "paddleocr_vl_vision", "persimmon", "phi", "phi3",
    "phi4_multimodal", "pixtral", "pocket_tts", "pocket_tts_audio_tokenizer",
    "pocket_tts_audio_tokenizer_decoder", "pocket_tts_audio_tokenizer_encoder", "qwen2", "qwen2_5_omni_dit",
    "qwen2_5_omni_vision_encoder", "qwen2_5_vl_vision", "qwen2_moe", "qwen2_vl_vision", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_moe_vision", "qwen3_5_text", "qwen3_5_vision", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe_talker_code_predictor", "qwen3_omni_moe_talker_text", "qwen3_omni_moe_vision_encoder",
    "qwen3_vl_moe_vision", "qwen3_vl_vision", "qwen4_exp_text", "qwen4_exp_vision", "recurrent_gemma",
    "sam2_video", "sam3_tracker_video", "sam3_vit_model", "seed_oss", "stablelm", "starcoder2", "step3p5_vision",
    "t5_gemma_module", "timesfm2_5", "unlimited_ocr_text", "vaultgemma", "video_llama_3_vision",
    "voxtral_realtime_encoder", "voxtral_realtime_text", "xcodec2", "zamba2",
))  # fmt: skip
"""Types whose configuration in transformers 5.22 has rope_parameters, and that are in no table above."""

KEYLESS = INTERLEAVED | set(BASES) | set(LAYERED) | BY_LAYER | OTHERS
"""Types that rotate even where their configuration has no key for it, such as the first ones of Llama and Falcon."""
