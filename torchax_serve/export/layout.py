"""Names of the files in a version of a bundle, and the options that its programs have."""

from __future__ import annotations

TOKENIZER, TEMPLATE, TOOLS_TEMPLATE = "tokenizer.json", "chat_template.jinja", "tools_template.jinja"
GENERATION_CONFIG = "generation_config.json"
GPU_CALLS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")
"""Kernels of Pallas for GPUs in programs, which JAX promises to read with the release that wrote them alone."""
TEXTS = "texts"
"""Name of the programs that read a batch of texts, and of the manifest's part about them."""
MODULE = "module"
"""Name of the programs of a module of any library, and of the manifest's part about them."""
INPUTS_FIRST = "inputs_first"
"""Name of the list of experts' weights that lie with their inputs first on TPUs."""
POOLING = ":pooling:"
"""Beginning of the names of tensors of layers behind the model."""
POOLING_WEIGHT = POOLING + "{}:{}"
"""Name of a tensor of a layer behind the model, by the layer's number and its own name."""
TEXT_SIZES = ("max_model_len", "max_num_seqs")
"""Options of the engine that programs of texts depend on."""
ENGINE_SIZES = (
    "max_model_len",
    "max_num_seqs",
    "page_size",
    "max_num_batched_tokens",
    "max_num_steps",
    "batch_invariant",
)
"""Options of the engine that its programs depend on."""
