"""Optimized programs of mixtures of experts on a CPU: stacked weights are read by kernels and by nothing else."""

import copy
import re

import pytest
import torch
from thorough import thorough

from model_adapters.ops import registry
from parity_sweep.tiny.config import tiny_config
from parity_sweep.tiny.models import causal_class, random_model
from torchax_serve import EngineOptions, SamplingParams, serve, to_jax
from torchax_serve.compilation.executable_cache import CachedFunction

ENGINE = EngineOptions(max_model_len=24, max_num_seqs=2, page_size=4, max_num_batched_tokens=16)
SIZES = {  # shapes that no other array has
    "hidden_size": 48,
    "d_model": 48,
    "intermediate_size": 88,
    "moe_intermediate_size": 88,
    "ffn_config": {"ffn_hidden_size": 88, "moe_num_experts": 7, "moe_top_k": 2},
}
READS = frozenset({"parameter", "get-tuple-element", "bitcast", "custom-call", "tuple"})
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]+)\]\S* ([\w\-]+)\(")
TYPES = ["qwen3_moe", "gpt_oss", "llama4_text", "dbrx"]
MORE = ["aria_text", "deepseek_v3", "granitemoe", "jetmoe", "longcat_flash", "mixtral", "nemotron_h", "phimoe"]


def model_of(model_type):
    fields = tiny_config(model_type).to_dict()
    overrides = {name: value for name, value in SIZES.items() if name in fields}
    if isinstance(overrides.get("ffn_config"), dict):
        overrides["ffn_config"] = {**fields["ffn_config"], **overrides["ffn_config"]}
    config = tiny_config(model_type, overrides=overrides)
    return random_model(causal_class(model_type), config).to(torch.bfloat16)


def stacks(model):
    """Returns shapes of weights of all experts of a layer, in any order of the axes."""
    found = {
        name: each for name, each in model.named_parameters() if "expert" in name or "moe" in name or "mlp" in name
    }
    kept = [tuple(each.shape) for name, each in found.items() if each.ndim == 3 or name.endswith(("w1", "v1", "w2"))]
    return {shape_key(each) for each in kept}


def shape_key(shape):
    return tuple(sorted(size for size in shape if size > 1))


@pytest.fixture
def programs(monkeypatch):
    texts = []
    compile_one = CachedFunction.compile

    def recorded(self, *args, **kwargs):
        program = compile_one(self, *args, **kwargs)
        made = program[0] if isinstance(program, tuple) else program
        texts.append(made.as_text())
        return program

    monkeypatch.setattr(CachedFunction, "compile", recorded)
    return texts


@pytest.mark.parametrize("model_type", [*TYPES, *(thorough(each) for each in MORE)])
def test_no_program_copies_or_converts_the_weights_of_all_experts(model_type, programs):
    model = model_of(model_type)
    sizes = stacks(model)
    assert sizes, [name for name, _ in model.named_parameters()]
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
    with registry.record_calls() as calls:
        with serve(copy.deepcopy(model), engine=ENGINE) as served:
            served.generate_batch(prompts, SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True))
        ids = torch.tensor([[5, 6, 7, 8]])
        to_jax(model).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    used = {implementation for op, implementation in calls if op in ("routed_matmul", "grouped_matmul")}
    assert used == {"cpu-ffi"}
    lines = [line for text in programs for line in text.splitlines()]
    matches = [(match, line) for line in lines if (match := INSTRUCTION.match(line))]
    found = [(shape_key(map(int, match[1].split(","))), match[2], line) for match, line in matches]
    assert len(found) > 300 and any("tas_routed_linear" in line for line in lines)
    assert any(shape in sizes for shape, _, _ in found)  # as parameters
    wrong = [line for shape, op, line in found if op not in READS and shape in sizes]
    assert wrong == []
