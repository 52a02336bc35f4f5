"""`route`: each combination of facts takes one path, with the reason why it takes no faster one."""

import re
from pathlib import Path as FilePath

import pytest

from torchax_serve.generation.routing import (
    EngineFacts,
    LoopCall,
    ModelCapabilities,
    Path,
    PromptCall,
    Route,
    RowsCall,
    engine_unsupported_reason,
    route,
)

ROOT = FilePath(__file__).resolve().parents[2]
DECODER = ModelCapabilities()
TEXT_TO_TEXT = ModelCapabilities(has_encoder=True, encoder_reads_tokens=True)
SPEECH_TO_TEXT = ModelCapabilities(has_encoder=True)
HOOKED = ModelCapabilities(unbatchable_reason="a forward hook is set on lm_head")
WITH_REPOSITORY_CODE = ModelCapabilities(has_repository_generate=True)
LONG_ROPE = ModelCapabilities(recomputes_sequence=True)


def never():
    raise AssertionError("an earlier rule decides")


def no_engine():
    return EngineFacts("its cache is recurrent")


DOCUMENTED = {
    "logits_processor=logits_processor": (LoopCall(custom_argument="logits_processor"), "logits_processor is given"),
    "prefix_allowed_tokens_fn=allow": (
        LoopCall(custom_argument="prefix_allowed_tokens_fn"),
        "prefix_allowed_tokens_fn is given",
    ),
    "guidance_scale=1.5": (LoopCall(unsupported_options=["guidance_scale"]), "guidance_scale is set"),
    "watermarking_config=watermarking_config": (
        LoopCall(unsupported_options=["watermarking_config"]),
        "watermarking_config is set",
    ),
    "output_attentions=True, return_dict_in_generate=True": (
        LoopCall(returns_attentions=True, media_reason=never),
        "attentions or hidden states are returned",
    ),
    "output_hidden_states=True, return_dict_in_generate=True": (
        LoopCall(returns_attentions=True, media_reason=never),
        "attentions or hidden states are returned",
    ),
    "cache=own_cache": (
        LoopCall(has_fresh_cache=False, has_irregular_mask=never),
        "the cache is not a fresh one of this model",
    ),
    "use_cache=False": (LoopCall(has_fresh_cache=False), "the cache is not a fresh one of this model"),
    "inputs_embeds=inputs_embeds": (
        LoopCall(embeddings="inputs_embeds", has_irregular_mask=never),
        "the forward gets inputs_embeds",
    ),
    "attention_mask=hole_in_the_middle": (
        LoopCall(has_irregular_mask=lambda: True),
        "the attention mask is more than padding on the left",
    ),
    "prefill_chunk_size=2": (
        LoopCall(prefills_in_chunks=True),
        "the prompt is prefilled in chunks, or this is an assistant",
    ),
}
CHOSEN_BY_TRANSFORMERS = {
    "num_beams=2",
    "assistant_model=assistant",
    "prompt_lookup_num_tokens=2",
    "custom_generate=custom_generate",
}
"""Rows for which transformers calls another function than the sampling loop, so that nothing is routed."""


@pytest.mark.parametrize("arguments", DOCUMENTED)
def test_documented_arguments_take_transformers_loop(arguments):
    call, reason = DOCUMENTED[arguments]
    assert route(DECODER, call) == Route(Path.TRANSFORMERS, reason)


def test_every_documented_row_is_in_the_table():
    text = (ROOT / "docs" / "generate.md").read_text()
    section = text.partition("\n## transformers' loop over the compiled forward\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(.+?)` \|", section, re.M)) == DOCUMENTED.keys() | CHOSEN_BY_TRANSFORMERS


@pytest.mark.parametrize(
    ("model", "call", "reason"),
    [
        (DECODER, LoopCall(has_encoder_output=never), None),
        (TEXT_TO_TEXT, LoopCall(), None),
        (SPEECH_TO_TEXT, LoopCall(), None),
        (SPEECH_TO_TEXT, LoopCall(has_encoder_output=lambda: False), "the encoder's output is no array"),
        (HOOKED, LoopCall(has_irregular_mask=never), "a forward hook is set on lm_head"),
        (DECODER, LoopCall(has_media=True), None),
        (DECODER, LoopCall(has_media=True, media_reason=lambda: "it grows"), "it grows"),
        (
            LONG_ROPE,
            LoopCall(has_media=True),
            "there is more than text, and the model computes it anew when it grows",
        ),
        (LONG_ROPE, LoopCall(), None),
        (WITH_REPOSITORY_CODE, LoopCall(), None),
    ],
)
def test_prepared_rows(model, call, reason):
    path = Path.STATIC_BATCH if reason is None else Path.TRANSFORMERS
    assert route(model, call) == Route(path, reason)


@pytest.mark.parametrize(
    ("model", "call", "expected"),
    [
        (DECODER, PromptCall(5), Route(Path.ENGINE)),
        (TEXT_TO_TEXT, PromptCall(5, lambda: EngineFacts(max_encoder_len=5)), Route(Path.ENGINE)),
        (
            TEXT_TO_TEXT,
            PromptCall(6, lambda: EngineFacts(max_encoder_len=5)),
            Route(Path.PREPARED, "its input has 6 tokens, and the engine has room for 5 of each (max_encoder_len)"),
        ),
        (SPEECH_TO_TEXT, PromptCall(5, never), Route(Path.PREPARED, "its encoder reads no tokens")),
        (
            DECODER,
            PromptCall(5, never, unsupported_options=["guidance_scale", "num_beams"]),
            Route(Path.PREPARED, "guidance_scale, num_beams is set"),
        ),
        (DECODER, PromptCall(5, no_engine), Route(Path.PREPARED, "its cache is recurrent")),
        (WITH_REPOSITORY_CODE, PromptCall(5, no_engine), Route(Path.REPOSITORY, "its cache is recurrent")),
        (
            TEXT_TO_TEXT,
            PromptCall(5, ends_in_loop=False),
            Route(Path.PREPARED, "its generate does more than it prepares for the loop over tokens"),
        ),
    ],
)
def test_prompts(model, call, expected):
    assert route(model, call) == expected


ROWS = {"num_rows": 2, "max_len": 20, "encoder_lens": lambda: [7, 9]}
ENGINE = EngineFacts(max_encoder_len=9, can_hold=lambda length: length <= 20)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"wants_tokens_only": False, "encoder_lens": never}, "more is asked for than tokens at the end"),
        ({"has_encoder_output": False, "encoder_lens": never}, "there is no encoder output"),
        ({"is_padded": True, "encoder_lens": never}, "the decoder's prompts are padded"),
        ({"has_uncounted_padding": True}, "a prompt has padding without a position"),
        (
            {"encoder_lens": lambda: None, "engine": never},
            "the decoder does not see the encoder's output from its beginning",
        ),
        ({"engine": no_engine}, "its cache is recurrent"),
        ({"max_len": 21}, "the answer may be longer than the engine has room for"),
        ({"max_len": None}, "the answer may be longer than the engine has room for"),
        (
            {"encoder_lens": lambda: [7, 10]},
            "the encoder's output is longer than the engine has room for, or shared by rows",
        ),
        (
            {"encoder_lens": lambda: [7]},
            "the encoder's output is longer than the engine has room for, or shared by rows",
        ),
    ],
)
def test_rows_of_a_static_batch(changes, reason):
    call = RowsCall(**{**ROWS, "engine": lambda: ENGINE, **changes})
    path = Path.ENGINE if reason is None else Path.STATIC_BATCH
    assert route(SPEECH_TO_TEXT, call) == Route(path, reason)


@pytest.mark.parametrize(
    ("model", "match"),
    [(HOOKED, "forward hook is set on lm_head, which sees one call"), (WITH_REPOSITORY_CODE, "a generate of its own")],
)
def test_models_without_an_engine(model, match):
    assert match in engine_unsupported_reason(model)
    assert engine_unsupported_reason(DECODER) is None
