"""Causes of failures by model type, written by people for docs/models.md."""

CAUSES: dict[str, str] = {
    "alibi: falcon": (
        "In transformers: its eager attention adds ALiBi twice, to the scores and in the mask, its `sdpa` attention "
        "once. Served, it does what `sdpa` does, which is the default."
    ),
    "blt": (
        "In transformers: its configuration has no `num_hidden_layers`, which its cache asks for, so eager `forward` "
        "and `generate` raise with their defaults. Without a cache they run; how it cuts bytes into patches depends "
        "on logits of another model inside, so the patches' number is known after a step alone."
    ),
    "layoutlmv2": "In the environment: transformers builds its backbone from the package `detectron2` alone.",
    "perceiver": "In the harness: the base model reads other inputs than token ids.",
    "xlm": (
        "In transformers 5.24: its `generate` gives the model a cache, which each step leaves its masked token "
        "in, so tokens are others than with `use_cache=False`. Served, they are those without a cache."
    ),
    "vibevoice": "Not speech to text: it speaks, by diffusion; the harness has no inputs for it.",
    "dia": "Not speech to text: it speaks; the harness has no inputs for its codes.",
    "pop2piano": "Not speech to text: it writes music; the harness has no inputs for it.",
    "diffusion_gemma": "In the harness: it generates by diffusion of blocks, which is not compared.",
    "evolla": "In the harness: it reads proteins, and no image.",
    "fast_vlm": "In the environment: transformers builds its vision tower from the package `timm` alone.",
    "perception_lm": "In the environment: as `fast_vlm`.",
    "udop": "Here: which patches of the image stand behind the text is computed from the boxes of its words.",
    "unlimited_ocr": (
        "Here: its cache keeps the whole prompt and a window of what follows, which caches here have no form for; "
        "without one, a placeholder token among the answer counts as one of the prompt."
    ),
    "kosmos-2.5": "Here: logits are the same, tokens behind the prompt differ; not understood.",
    "pi0": "In transformers: not a model of text. It gives a robot's actions.",
    "pp_formulanet": "In transformers: `get_input_embeddings`, by which a model's vocabulary is known, raises.",
    "pix2struct": "Here: an encoder reads the image alone; see the section on sequence to sequence.",
    "florence2": "Here: as `pix2struct`.",
    "gemma3n": (
        "In the environment: transformers builds its vision tower from the package `timm` alone. On text it "
        "passes with `timm`; for images there is no tiny configuration, whose features the tower would have to fit."
    ),
    "gemma4_assistant": (
        "In transformers: not a model by itself. It reads the keys of the model that it drafts for, and a "
        "bare configuration, all of whose layers share such keys, is refused."
    ),
    "gemma4_unified_assistant": "In transformers: as `gemma4_assistant`.",
}

_TIME_STEPS = (
    "In transformers: `mamba_chunk_scan_combined`, which computes a prompt, raises time steps to `time_step_min`; "
    "`selective_state_update`, which computes a token behind it, does not."
)
_BLIP_2 = (
    "In transformers: `{0}.generate` embeds the prompt and ends in `language_model.generate`; its own `forward` "
    "computes `get_image_features(pixel_values)` in every call, so there is none for a token behind the prompt."
)
_IMAGES: dict[str, str] = {
    "blip": (
        "In transformers: `BlipForConditionalGeneration.generate` ends in `text_decoder.generate`, whose layers attend "
        "to the patches of the image (`encoder_hidden_states`) in every step."
    ),
    "blip-2": _BLIP_2.format("Blip2ForConditionalGeneration"),
    "chameleon": "In transformers: `ChameleonModel.forward` puts features in place and runs the layers itself.",
    "florence2": "In transformers: its encoder reads the tokens of the prompt behind the image's features.",
    "git": "In transformers: `GitModel.forward` concatenates patches and text, and the cache holds both.",
    "granite4_vision": (
        "In transformers: `Granite4VisionTextModel.forward` adds features of the image in front of later layers, too "
        "(`deepstack_features`)."
    ),
    "idefics": (
        "In transformers: the cross attention of `IdeficsModel.forward` gets `image_hidden_states` in every step, with "
        "a mask that grows."
    ),
    "instructblip": _BLIP_2.format("InstructBlipForConditionalGeneration"),
    "instructblipvideo": _BLIP_2.format("InstructBlipVideoForConditionalGeneration"),
    "kosmos-2": (
        "In transformers: `Kosmos2ForConditionalGeneration.generate` ends in `text_model.generate`, and that model "
        "puts features in place itself (`Kosmos2TextTransformer.forward_embedding`)."
    ),
    "kosmos-2.5": "In transformers: `Kosmos2_5TextTransformer` puts features in place itself and runs the layers.",
    "mllama": (
        "In transformers: `MllamaTextCrossAttention.forward` keeps keys of the image's patches in the cache of its "
        "layers, which pages do not have."
    ),
    "t5gemma2": "In transformers: `T5Gemma2Encoder.forward` reads the tokens of the prompt and the image.",
    "pp_formulanet": (
        "In transformers: `PPFormulaNetModel.forward` gives the decoder the `pooler_output` of its encoder, and not "
        "the last hidden state, which the engine keeps for each request."
    ),
}
_VOXTRAL = (
    "In transformers: `VoxtralRealtimeForConditionalGeneration.forward` adds the features of a frame of audio to the "
    "token of every step."
)
FALLBACK_CAUSES: dict[str, dict[str, str]] = {
    "causal": {
        "moshi": (
            "In transformers: `MoshiModel.forward` masks by `create_causal_mask`, which shows a prompt all of its "
            "tokens, and `DynamicCache` keeps those of `sliding_window`, which is what a step sees."
        ),
        "nemotron_h": _TIME_STEPS,
        "zamba2": _TIME_STEPS,
    },
    "seq2seq": {"voxtral_realtime": _VOXTRAL},
    "speech": {
        "kyutai_speech_to_text": (
            "In transformers: `KyutaiSpeechToTextForConditionalGeneration.prepare_inputs_for_generation` adds the "
            "codes of a frame of audio to the token of every step."
        ),
        "voxtral_realtime": _VOXTRAL,
    },
    "images": _IMAGES,
    "configurations": {},
}
"""Code that makes a type run one request at a time, by task, where the refusal names what was seen."""

NOT_PACKED: dict[str, str] = {}
"""Code that keeps causal types with recurrent states from running packed, where the reason is what was seen."""

_ENCODERS_MASKS = "In transformers 5.17: a decoder with the masks of an encoder, whose own cache is kept."
_QWEN4_EXP = (
    "In transformers 5.17: it keeps positions on the cache itself, in no layer of it, where a step here would not find "
    "them: refused by name."
)
_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
_RECURRENT = (
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "mamba", "mamba2"),
    *("minimax", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("inkling_text", "recurrent_gemma", "zamba", "zaya"),
)
_SPARSE = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")

OLDER: dict[str, dict[str, str]] = {
    "5.17.0": dict.fromkeys(("big_bird", "megatron-bert", "rembert", "roformer"), _ENCODERS_MASKS)
    | dict.fromkeys(_LATENT, "That sweep was made before latent attention ran packed.")
    | dict.fromkeys(_SPARSE, "That sweep was made before sparse attention ran packed.")
    | dict.fromkeys(_RECURRENT, "That sweep was made before recurrent layers ran packed.")
    | {
        "gemma3n": "In the environment: `timm` was not installed for this sweep.",
        "mllama": "In transformers 5.23: its cross attention reads the keys of its cache, which pages do not have.",
        "moshi": (
            "In transformers 5.17: without an attention mask its forward shows tokens those behind them. Served, it "
            "does not. `generate` gives a mask, and its tokens are the same."
        ),
        "opt": "In transformers 5.17: it makes a mask of ones where it is given none, which packing does not take.",
        "xlm": "In transformers 5.24: its `generate` gives the model a cache, as it did not before.",
        "qwen4_exp": _QWEN4_EXP,
        "qwen4_exp_text": _QWEN4_EXP,
    },
}
"""Causes of other outcomes with an older transformers, by version and model type."""
