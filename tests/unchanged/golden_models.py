"""Tiny models whose programs and answers are compared before and after a change that should change neither."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in (".", "core", "engine", "seq2seq"))

from tiny_models import VOCAB_SIZE, tiny_model
from tiny_whisper import tiny_whisper
from weights import draw_matrices

from torchax_serve import EngineOptions

SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "page_size": 4,
    "max_num_batched_tokens": 16,
    "kv_cache_memory_bytes": 300_000,
}
FEW_PAGES = 24


@dataclasses.dataclass(frozen=True)
class GoldenModel:
    """A model, how it is served, and options that its requests may not have.

    Attributes:
        make: Makes the module.
        engine: Fields of `EngineOptions` besides `SMALL`.
        options: Further arguments of `serve`.
        takes_text: Whether requests have token ids only; False: there are programs of it, and no answers here.
    """

    make: Callable[[], Any]
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    takes_text: bool = True

    def engine_options(self):
        return EngineOptions(**{**SMALL, **self.engine})


def _bart():
    config = transformers.BartConfig(
        vocab_size=VOCAB_SIZE, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
        forced_eos_token_id=None, decoder_start_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    draw_matrices(model, std=0.2)
    return model


def _adapted():
    """A model of which an adapter is made by `adapter_folders`."""
    return tiny_model("llama")


def _of(model_type):
    return lambda: tiny_model(model_type)


def _speech():
    return tiny_whisper(encoder_layers=1, num_mel_bins=8, max_source_positions=32)


MODELS: dict[str, GoldenModel] = {
    "packed": GoldenModel(_of("llama")),
    "few pages": GoldenModel(_of("llama"), {"kv_cache_memory_bytes": 512 * 4 * FEW_PAGES}),
    "head_dim": GoldenModel(_of("qwen3"), {"max_num_steps": 3}),
    "windowed": GoldenModel(_of("gemma3_text")),
    "learned positions": GoldenModel(_of("gpt2")),
    "experts": GoldenModel(_of("mixtral")),
    "latent": GoldenModel(_of("youtu")),
    "hybrid": GoldenModel(_of("qwen3_5_text")),
    "recurrent": GoldenModel(_of("mamba")),
    "own positions": GoldenModel(_of("gptj")),
    "per-sequence": GoldenModel(_of("bloom")),
    "encoder-decoder": GoldenModel(_bart, {"max_encoder_len": 32}),
    "speech": GoldenModel(_speech, takes_text=False),
    "adapters": GoldenModel(_adapted, options={"adapters": ("red", "blue")}),
    "drafts": GoldenModel(_of("llama"), {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}),
    "int8": GoldenModel(_of("llama"), options={"quantization": "int8"}),
}


def adapter_folders(root, names):
    """Folders of adapters of the model "adapters", made with fixed seeds."""
    from adapter_models import PeftModels

    return PeftModels(tiny_model("llama"), root, {name: {"r": 4} for name in names}).folders()


def served(name, root):
    """The served model `name`; files of adapters are written under `root`."""
    from torchax_serve import serve

    model = MODELS[name]
    options = dict(model.options)
    if names := options.pop("adapters", ()):
        options["adapters"] = adapter_folders(root, names)
    return serve(model.make(), engine=model.engine_options(), **options)
