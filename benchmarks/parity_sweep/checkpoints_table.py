"""Section of docs/models.md about published configurations, by the names of checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from model_adapters.loading.short_names import SHORT_NAMES
from parity_sweep.page_section import Section, inline
from torchax_serve.parity.result import PASSED, Result

_EQUAL_SCORES = (
    "With random weights its indexer's scores are exactly zero for many keys, and which of equal scores PyTorch takes "
    "is arbitrary; with the first of them taken in PyTorch, too, logits are within 1e-5."
)
_MASK_OF_LENGTH_ONE = (
    "In transformers: steps with a cache make the mask as long as the keys of the first layer, which keeps a state and "
    "no keys, so all layers see the padding on the left. Served, the tokens are those of each prompt alone, and of "
    "eager `generate` with `use_cache=False`."
)
CAUSES: dict[str, str] = {
    "MiniMaxAI--MiniMax-Text-01-hf": _MASK_OF_LENGTH_ONE,
    "OpenGVLab--InternVL3-1B-hf": "Here: its rotary frequencies depend on the length of a sequence.",
    **dict.fromkeys(("deepseek-ai--DeepSeek-V3.2", "zai-org--GLM-5"), _EQUAL_SCORES),
}
"""Causes of failures by the name of the configuration, written by people."""

WRITTEN = frozenset(
    {
        "EleutherAI--gpt-neo-125m",
        "EleutherAI--pythia-410m",
        "EleutherAI--pythia-70m",
        "HuggingFaceTB--SmolLM3-3B",
        "LGAI-EXAONE--EXAONE-4.0-1.2B",
        "LGAI-EXAONE--EXAONE-4.0-32B",
        "LiquidAI--LFM2-1.2B",
        "LiquidAI--LFM2-350M",
        "Qwen--Qwen2.5-0.5B-Instruct",
        "Qwen--Qwen2.5-Coder-7B-Instruct",
        "Qwen--Qwen3-30B-A3B",
        "ai21labs--Jamba-v0.1",
        "allenai--OLMo-2-0425-1B-Instruct",
        "allenai--OLMo-2-1124-7B-Instruct",
        "allenai--OLMoE-1B-7B-0924-Instruct",
        "bigscience--bloom-560m",
        "deepseek-ai--DeepSeek-R1-Distill-Llama-8B",
        "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B",
        "distilbert--distilgpt2",
        "facebook--opt-125m",
        "facebook--xlm-roberta-xl",
        "google--gemma-3-12b-it",
        "google--gemma-3-270m-it",
        "google--gemma-3-27b-it",
        "google--gemma-3-4b-it",
        "google-bert--bert-base-uncased",
        "ibm-granite--granite-3.3-2b-instruct",
        "meta-llama--Llama-3.3-70B-Instruct",
        "microsoft--phi-2",
        "microsoft--phi-4",
        "mistralai--Mixtral-8x7B-Instruct-v0.1",
        "openai-community--gpt2-large",
        "openai-community--gpt2-xl",
        "stabilityai--stablelm-2-1_6b-chat",
        "state-spaces--mamba-130m-hf",
        "tiiuae--Falcon-H1-0.5B-Instruct",
        "tiiuae--Falcon3-1B-Instruct",
    }
)
"""Checkpoints whose complete file was not available: their keys are written from published values."""

_HEADINGS = ("checkpoint", "short name", "class", "executor", "difference", "tokens", "s")
_INTRODUCTION = """\
Published `config.json` files with their keys as they are and sizes made small, served under the class that `serve`
takes for them, with random weights, against eager PyTorch. **{passed} of {total} pass**; {impossible} more cannot be
compared, since transformers itself cannot build or run them. The comparison is that of the type's task above: logits
and greedy tokens in a padded batch, unbatched, and on the engine; hidden states or labels of the other models.
The files are not part of this project: `python benchmarks/checkpoints.py FOLDER` takes them from a folder.
Of the {written} checkpoints with a †, the complete file was not available: their keys are written from published values
(kinds of layers, heads, rotary embeddings, special tokens), and may differ from the file."""


def file_name(hub_id: str) -> str:
    """Returns the name of a checkpoint's result, ``organisation--name``."""
    return hub_id.replace("/", "--")


def section(title: str, results: Mapping[str, Result], describe_tokens: Callable[[Result], str]) -> Section:
    """Returns the section.

    Args:
        title: Title of the section.
        results: Results by the names of checkpoints.
        describe_tokens: Describes which tokens of a result were compared.
    """
    short = {file_name(each.hub_id): name for name, each in SHORT_NAMES.items()}
    counts = Counter(result.status for result in results.values())
    total = len(results) - counts["impossible"]
    said = _INTRODUCTION.format(
        passed=counts[PASSED], total=total, impossible=counts["impossible"], written=len(WRITTEN & results.keys())
    )
    lines = [said, ""]
    if rest := [name for name in sorted(results) if results[name].status != PASSED]:
        lines += ["What does not pass:", ""]
        lines += [f"* {_shown(name)} ({results[name].status}). {_cause(name, results[name])}" for name in rest] + [""]
    if without := sorted(name for file, name in short.items() if file not in results):
        lines += [f"Short names whose files were not available: {', '.join(f'`{name}`' for name in without)}."]
    rows = []
    for name in sorted(results):
        result = results[name]
        difference = "" if result.forward_difference is None else f"{result.forward_difference:.0e}"
        compared = describe_tokens(result) if result.status in (PASSED, "failed") else result.status
        seconds = "" if result.total_s is None else f"{result.total_s:.1f}"
        cells = (short.get(name, ""), result.class_name, result.executor or "", difference, compared)
        mark = " †" if name in WRITTEN else ""
        rows.append((_shown(name) + mark, *cells, seconds))
    return Section(title, lines, _HEADINGS, rows)


def _shown(name: str) -> str:
    return name.replace("--", "/", 1)


def _cause(name: str, result: Result) -> str:
    said = inline(result.error or "numbers or tokens differ")
    return f"{CAUSES[name]} Said: {said}" if name in CAUSES else said
