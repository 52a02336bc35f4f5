"""Folders that `quantize` writes, read by vLLM on a CPU: its own parser, weight loader and kernels.

vLLM has its own release of torch, so that it runs in a process of its own: ``python benchmarks/peers.py install
environments vllm``, then ``pytest -n 0 tests/format_tools/test_vllm.py --vllm environments/vllm``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_folders import tiny_llama

from model_adapters.loading.save_quantized import save_quantized
from torchax_serve import EngineOptions, SamplingParams, serve

READER = Path(__file__).with_name("vllm_reader.py")
PROMPTS = [[5, 17, 40, 3, 61, 22, 9], [80, 2, 33, 33, 7]]
NUM_TOKENS = 6
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 2}
CLASSES = {
    "int4": "CompressedTensorsWNA16",
    "w8a8": "CompressedTensorsW8A8Int8",
    "fp8-w8a8": "CompressedTensorsW8A8Fp8",
}
"""Presets that vLLM 0.32 has kernels on a CPU for, and the class that its parser chooses."""
ATOL = {"int4": 0.05, "w8a8": 0.12, "fp8-w8a8": 0.25}
"""In nats. Activations are rounded from bfloat16 there and from float32 here, which moves some by a step of 8 bits; the
steps of float8 are the widest."""
REFUSED = ("int8", "fp8")
"""Presets whose scheme vLLM reads, and has kernels on GPUs alone for: weights of 8 bits without rounded activations."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder in each preset."""
    root = tmp_path_factory.mktemp("vllm")
    tiny_llama(**SIZES, num_key_value_heads=1).save_pretrained(root / "dense")
    for preset in (*CLASSES, *REFUSED):
        save_quantized(root / "dense", root / preset, preset)
    return root


@pytest.fixture(scope="module")
def found(vllm, folders):
    """What vLLM makes of each folder."""
    base = getattr(sys, "_base_executable", sys.executable)
    presets = (*CLASSES, *REFUSED)
    done = subprocess.run(
        [base, "-S", str(READER), str(NUM_TOKENS), *(str(folders / preset) for preset in presets)],
        input=json.dumps(PROMPTS),
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(vllm),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",  # else it compiles C++ for the log-probabilities
            "DO_NOT_TRACK": "1",
        },
        cwd=folders,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert len(lines) == len(presets), done.stderr[-3000:]
    return dict(zip(presets, lines, strict=True))


def by_this_project(folder):
    """Greedy tokens, and log-probabilities of the prompts."""
    rows = []
    sampling = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
    with serve(folder, dtype="float32", engine=EngineOptions(max_num_seqs=2)) as model:
        for ids in PROMPTS:
            logprobs = model.torch_model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            along = [float(logprobs[place, token]) for place, token in enumerate(ids[1:])]
            rows.append({"tokens": list(model.iter_tokens(ids, params=sampling)), "prompt_logprobs": along})
    return rows


@pytest.mark.parametrize("preset", CLASSES)
def test_vllm_computes_with_what_was_written(preset, folders, found):
    assert "error" not in found[preset] and CLASSES[preset] in found[preset]["classes"], found[preset]
    for got, wanted in zip(found[preset]["rows"], by_this_project(folders / preset), strict=True):
        np.testing.assert_allclose(got["prompt_logprobs"], wanted["prompt_logprobs"], atol=ATOL[preset])
        if preset == "int4":
            assert got["tokens"] == wanted["tokens"]


@pytest.mark.parametrize("preset", REFUSED)
def test_what_vllm_has_kernels_for_on_gpus_alone_is_refused_by_the_kernel_and_not_by_the_parser(preset, found):
    assert "Failed to find a kernel that can implement" in found[preset]["error"]
