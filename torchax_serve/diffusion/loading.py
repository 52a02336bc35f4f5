"""Loads a pipeline of diffusers from a folder, its models on JAX."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from jax.sharding import Mesh

from model_adapters.errors import (
    CheckpointError,
    InvalidArgumentError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from model_adapters.loading.model_class import torch_dtype_of
from model_adapters.program.trace_context import trace_lock
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.compilation.program_signature import model_identity
from torchax_serve.compilation.xla_cache import programs_dir
from torchax_serve.diffusion.pipeline import is_component, pipeline_to_jax
from torchax_serve.diffusion.sharding import placements
from torchax_serve.modules.placement import on_mesh
from torchax_serve.modules.runtime import ModuleRuntime, arrays_of
from torchax_serve.modules.to_jax import module_to_jax

DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder")
"""Names of the components that run once a step: their files say the dtype, and a mesh shares them."""


def load_pipeline(folder: Path, *, dtype: Any = "auto", allow_pickle: bool = False, mesh: Mesh | None = None) -> Any:
    """Returns the pipeline in `folder`, its models on JAX.

    Args:
        folder: Folder with ``model_index.json``.
        dtype: Of the weights; "auto": that of the files of the model that runs once a step.
        allow_pickle: Load weights from pickle files where there are no safetensors.
        mesh: Devices that share the weights of that model by its sharding rules.

    Raises:
        CheckpointError: files that diffusers cannot load.
        UnsupportedModelError: diffusers is not installed, or no sharding rules are known.
    """
    try:
        from diffusers import DiffusionPipeline
    except ImportError as error:
        raise UnsupportedModelError(
            f"{folder} is a pipeline of diffusers, which cannot be imported ({error}); run pip install "
            "'torchax-serve[diffusion]'"
        ) from error
    wanted = torch_dtype_of(dtype) or _dtype_of_files(folder) or torch.float32
    try:
        with trace_lock():  # it sets PyTorch's default dtype, which a trace of another thread would read
            pipeline = DiffusionPipeline.from_pretrained(
                str(folder), torch_dtype=wanted, local_files_only=True, use_safetensors=None if allow_pickle else True
            )
    except Exception as error:  # diffusers raises many kinds for files that are missing or do not fit
        lines = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"{folder}: expected a pipeline that diffusers can load, got {type(error).__name__}: {lines[0][:300]}; "
            "check its files"
        ) from error
    return put_on_jax(pipeline, mesh=mesh)


def put_on_jax(pipeline: Any, *, mesh: Mesh | None = None) -> Any:
    """Makes the models of `pipeline` run on JAX with stored programs; returns the pipeline."""
    if mesh is not None and mesh.shape["expert"] > 1:
        raise UnsupportedArgumentError(
            f"mesh: expected the axes data and model with a pipeline, got {dict(mesh.shape)}; leave expert out"
        )
    sharded = [name for name, module in pipeline.components.items() if name in DENOISERS and is_component(module)]
    if mesh is not None and not sharded:
        raise InvalidArgumentError(
            f"mesh: expected a pipeline with one of {', '.join(DENOISERS)}, got {type(pipeline).__name__}; leave it out"
        )
    for name, module in pipeline.components.items():
        if is_component(module):
            module_to_jax(module, _runtime_of(module, mesh if name in sharded else None))
    return pipeline_to_jax(pipeline)


def _runtime_of(module: Any, mesh: Mesh | None) -> ModuleRuntime:
    weights = arrays_of(module)
    if mesh is not None:
        placed = placements(module, mesh)
        weights = {name: on_mesh(array, placed[name], mesh) for name, array in weights.items()}
        return ModuleRuntime(module, weights, mesh=mesh, placed=placed)
    folder = programs_dir()
    if folder is None:
        return ModuleRuntime(module, weights)
    described = {"diffusers": importlib.metadata.version("diffusers"), "config": dict(module.config)}
    identity = model_identity(type(module), json.dumps(described, sort_keys=True, default=str), weights)
    return ModuleRuntime(module, weights, ExecutableCache(folder, identity))


def _dtype_of_files(folder: Path) -> torch.dtype | None:
    """Returns the first floating-point dtype of the model of each step; None if unknown."""
    from safetensors import safe_open

    for name in DENOISERS:
        for file in sorted((folder / name).glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118  # not a mapping
                    part = opened.get_slice(key)
                    if part.get_shape() and part[:0].dtype.is_floating_point:
                        dtype: torch.dtype = part[:0].dtype
                        return dtype
    return None
