"""The table of well-known names, and suggestions for a name that is not in it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class ShortName:
    """A model that has a short name."""

    hub_id: str
    num_parameters: int
    note: str


_GEMMA = "Google; the licence has to be accepted on its page"
_LLAMA = "Meta; access has to be asked for on its page"
_QWEN3 = "Alibaba; thinks before it answers unless told not to"
_QWEN2 = "Alibaba"
_R1 = "DeepSeek; reasons at length"
_BASE = "continues text, has no chat template"

# name: (hub id, parameters in millions, note)
_TABLE: dict[str, tuple[str, float, str]] = {
    "gemma-2-2b-it": ("google/gemma-2-2b-it", 2_614, _GEMMA),
    "gemma-2-9b-it": ("google/gemma-2-9b-it", 9_242, _GEMMA),
    "gemma-3-270m-it": ("google/gemma-3-270m-it", 268, _GEMMA),
    "gemma-3-1b-it": ("google/gemma-3-1b-it", 1_000, _GEMMA),
    "gemma-3-4b-it": ("google/gemma-3-4b-it", 4_300, _GEMMA),
    "gemma-3-12b-it": ("google/gemma-3-12b-it", 12_187, _GEMMA),
    "gemma-3-27b-it": ("google/gemma-3-27b-it", 27_432, _GEMMA),
    "llama-3.1-8b-instruct": ("meta-llama/Llama-3.1-8B-Instruct", 8_030, _LLAMA),
    "llama-3.1-70b-instruct": ("meta-llama/Llama-3.1-70B-Instruct", 70_554, _LLAMA),
    "llama-3.2-1b-instruct": ("meta-llama/Llama-3.2-1B-Instruct", 1_236, _LLAMA),
    "llama-3.2-3b-instruct": ("meta-llama/Llama-3.2-3B-Instruct", 3_213, _LLAMA),
    "llama-3.3-70b-instruct": ("meta-llama/Llama-3.3-70B-Instruct", 70_554, _LLAMA),
    "tinyllama-1.1b-chat": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100, "a small Llama, trained by volunteers"),
    "qwen2.5-0.5b-instruct": ("Qwen/Qwen2.5-0.5B-Instruct", 494, _QWEN2),
    "qwen2.5-1.5b-instruct": ("Qwen/Qwen2.5-1.5B-Instruct", 1_544, _QWEN2),
    "qwen2.5-3b-instruct": ("Qwen/Qwen2.5-3B-Instruct", 3_086, _QWEN2),
    "qwen2.5-7b-instruct": ("Qwen/Qwen2.5-7B-Instruct", 7_616, _QWEN2),
    "qwen2.5-coder-7b-instruct": ("Qwen/Qwen2.5-Coder-7B-Instruct", 7_616, "Alibaba; for code"),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", 596, _QWEN3),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", 1_721, _QWEN3),
    "qwen3-4b": ("Qwen/Qwen3-4B", 4_022, _QWEN3),
    "qwen3-4b-instruct-2507": ("Qwen/Qwen3-4B-Instruct-2507", 4_022, "Alibaba; answers at once"),
    "qwen3-8b": ("Qwen/Qwen3-8B", 8_191, _QWEN3),
    "qwen3-14b": ("Qwen/Qwen3-14B", 14_768, _QWEN3),
    "qwen3-32b": ("Qwen/Qwen3-32B", 32_762, _QWEN3),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", 30_532, "Alibaba; mixture of experts, 3.3 billion active"),
    "mistral-7b-instruct-v0.3": ("mistralai/Mistral-7B-Instruct-v0.3", 7_248, "Mistral AI"),
    "mistral-nemo-instruct": ("mistralai/Mistral-Nemo-Instruct-2407", 12_248, "Mistral AI and NVIDIA"),
    "ministral-8b-instruct": ("mistralai/Ministral-8B-Instruct-2410", 8_020, "Mistral AI; licence on its page"),
    "mixtral-8x7b-instruct": ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46_703, "Mistral AI; mixture of experts"),
    "phi-3.5-mini-instruct": ("microsoft/Phi-3.5-mini-instruct", 3_821, "Microsoft"),
    "phi-4": ("microsoft/phi-4", 14_660, "Microsoft"),
    "phi-4-mini-instruct": ("microsoft/Phi-4-mini-instruct", 3_836, "Microsoft"),
    "smollm2-135m-instruct": ("HuggingFaceTB/SmolLM2-135M-Instruct", 135, "Hugging Face; small enough for any machine"),
    "smollm2-360m-instruct": ("HuggingFaceTB/SmolLM2-360M-Instruct", 362, "Hugging Face"),
    "smollm2-1.7b-instruct": ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711, "Hugging Face"),
    "smollm3-3b": ("HuggingFaceTB/SmolLM3-3B", 3_075, "Hugging Face; thinks before it answers unless told not to"),
    "olmo-2-1b-instruct": ("allenai/OLMo-2-0425-1B-Instruct", 1_485, "Allen Institute; training data open"),
    "olmo-2-7b-instruct": ("allenai/OLMo-2-1124-7B-Instruct", 7_299, "Allen Institute; training data open"),
    "olmoe-1b-7b-instruct": ("allenai/OLMoE-1B-7B-0924-Instruct", 6_919, "Allen Institute; mixture of experts"),
    "granite-3.3-2b-instruct": ("ibm-granite/granite-3.3-2b-instruct", 2_534, "IBM"),
    "granite-3.3-8b-instruct": ("ibm-granite/granite-3.3-8b-instruct", 8_171, "IBM"),
    "falcon3-1b-instruct": ("tiiuae/Falcon3-1B-Instruct", 1_669, "TII"),
    "falcon-h1-0.5b-instruct": ("tiiuae/Falcon-H1-0.5B-Instruct", 521, "TII; attention and state space side by side"),
    "lfm2-350m": ("LiquidAI/LFM2-350M", 354, "Liquid AI; convolutions and attention"),
    "lfm2-1.2b": ("LiquidAI/LFM2-1.2B", 1_170, "Liquid AI; convolutions and attention"),
    "deepseek-r1-distill-qwen-1.5b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777, _R1),
    "deepseek-r1-distill-llama-8b": ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8_030, _R1),
    "stablelm-2-1.6b-chat": ("stabilityai/stablelm-2-1_6b-chat", 1_645, "Stability AI"),
    "mamba-130m": ("state-spaces/mamba-130m-hf", 129, "state space, no attention; " + _BASE),
    "gpt2": ("openai-community/gpt2", 124, "OpenAI; " + _BASE),
    "gpt2-medium": ("openai-community/gpt2-medium", 355, "OpenAI; " + _BASE),
    "gpt2-large": ("openai-community/gpt2-large", 774, "OpenAI; " + _BASE),
    "gpt2-xl": ("openai-community/gpt2-xl", 1_558, "OpenAI; " + _BASE),
    "distilgpt2": ("distilbert/distilgpt2", 82, _BASE),
    "gpt-neo-125m": ("EleutherAI/gpt-neo-125m", 125, "EleutherAI; " + _BASE),
    "pythia-70m": ("EleutherAI/pythia-70m", 70, "EleutherAI; " + _BASE),
    "pythia-410m": ("EleutherAI/pythia-410m", 405, "EleutherAI; " + _BASE),
    "bloom-560m": ("bigscience/bloom-560m", 559, "BigScience; 46 languages; " + _BASE),
    "opt-125m": ("facebook/opt-125m", 125, "Meta; pickle files only, needs allow_pickle; " + _BASE),
    "starcoder2-3b": ("bigcode/starcoder2-3b", 3_030, "BigCode; for code; " + _BASE),
}

SHORT_NAMES: Mapping[str, ShortName] = MappingProxyType(
    {name: ShortName(hub_id, int(millions * 1e6), note) for name, (hub_id, millions, note) in _TABLE.items()}
)
"""Models by short name (lower case).

Each has a hub id, a number of parameters (as published, rounded) and a one-line note.
"""


def short_name(name: str) -> ShortName | None:
    """Returns the entry of the table for `name`, in any case; None if there is none."""
    return SHORT_NAMES.get(name.strip().lower())


def near_matches(name: str, limit: int = 4) -> list[str]:
    """Returns short names similar to `name` without its organisation, the nearest first."""
    return difflib.get_close_matches(name.strip().lower().rsplit("/", 1)[-1], SHORT_NAMES, n=limit, cutoff=0.5)
