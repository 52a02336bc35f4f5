"""`serve`: loads a model and makes it run on JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from jax.sharding import Mesh
from transformers import PreTrainedModel

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading import Progress, load_model
from model_adapters.loading.compress_weights import prepare_weights
from torchax_serve.compilation import gc_pause
from torchax_serve.compilation.xla_cache import enable_compile_cache
from torchax_serve.distributed.hosts.leader import Leader
from torchax_serve.distributed.hosts.options import Hosts
from torchax_serve.distributed.hosts.startup import (
    check_same_model,
    joined,
    load_digest,
    mesh_of_hosts,
    shared_arguments,
)
from torchax_serve.distributed.mesh import mesh_for
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.encoder_model import EncoderModel
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.entrypoints.speech_model import SpeechModel, is_speech_model
from torchax_serve.validation.argument_hints import refuses_unknown


@refuses_unknown
def serve(
    model: str | os.PathLike[str] | PreTrainedModel | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    strict: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    random_weights: bool = False,
    engine: EngineOptions | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    tensor_parallel: int | None = None,
    refuse_uneven: bool = False,
    hosts: Hosts | None = None,
    pack_weights: bool = True,
    quantization: Any = None,
    requantize: bool = False,
) -> ServedModel:
    """Loads a model and makes it run on JAX, its code untouched.

    Returns a `ServedModel` for models that generate, a `SpeechModel` if they also transcribe, else an `EncoderModel`.

    Args:
        model: a short name, a hub id, a folder or GGUF file, a loaded `PreTrainedModel`; None: the embedded model.
        revision: branch, tag or commit on the hub.
        token: access token for gated repositories.
        local_files_only: do not use the network.
        dtype: dtype of the weights; "auto" follows the checkpoint.
        trust_remote_code: run code that comes with the checkpoint.
        allow_pickle: read pickle files if there are no safetensors.
        strict: raise for tensors that the model does not use and for a missing head; else ``load_report`` lists them.
        cache_dir: folder of downloads; None is the hub library's own folder.
        progress: shows download, load and compilation.
        random_weights: make up the weights; only the configuration is read.
        engine: batching and cache memory; None chooses.
        mesh: number of devices on the axes ``model`` and ``expert``, and of replicas on ``data``; or a mesh with them.
        tensor_parallel: short for ``mesh={"model": tensor_parallel}``.
        refuse_uneven: raise for sizes that the devices do not divide; else they are padded with zeros.
        hosts: the hosts that share the model, of which this is the leader; the others call `follow`.
        pack_weights: compress bfloat16 weights to 3/4 of their bytes without loss, on one CPU with AVX and without AMX.
        quantization: preset ("int8", "int4", "fp8", ...), file or rules for fewer bits; "none": dense.
        requantize: let `quantization` round weights again that the checkpoint has quantized.

    Raises:
        TorchaxServeError: the model cannot be loaded or served; subclass and message say why.
    """
    arguments = locals()  # taken first: they are the only variables yet
    loading = {name: arguments[name] for name in _LOADING}
    enable_compile_cache()
    with gc_pause.paused():
        if hosts is None:
            loaded = load_model(model, mesh=mesh_for(mesh, tensor_parallel), **loading)
            if pack_weights:
                prepare_weights(loaded)
            return model_class_for(loaded.module)(loaded, engine)
        return _serve_on_hosts(hosts, model, engine, mesh, tensor_parallel, loading)


_LOADING = (
    "revision",
    "token",
    "local_files_only",
    "dtype",
    "trust_remote_code",
    "allow_pickle",
    "strict",
    "cache_dir",
    "progress",
    "random_weights",
    "refuse_uneven",
    "quantization",
    "requantize",
)
"""Arguments of `serve` that `load_model` takes under the same names."""


def _serve_on_hosts(
    hosts: Hosts,
    model: str | os.PathLike[str] | PreTrainedModel | None,
    engine: EngineOptions | None,
    mesh: Mesh | Mapping[str, int] | None,
    tensor_parallel: int | None,
    loading: dict[str, Any],
) -> ServedModel:
    """Returns a model whose weights are sharded over the devices of `hosts`.

    This process is their leader.

    Raises:
        InvalidArgumentError: `hosts` names another process as the leader.
    """
    if not hosts.is_leader:
        raise InvalidArgumentError(
            f"hosts: expected host_id 0, the leader's, got {hosts.host_id}; call follow() on the other hosts"
        )
    with joined(hosts, model, shared_arguments(loading, mesh, tensor_parallel)) as followers:
        loaded = load_model(model, mesh=mesh_of_hosts(hosts, mesh, tensor_parallel), **loading)
        check_same_model(followers, load_digest(loaded))
    assert loaded.sharding is not None
    return model_class_for(loaded.module)(loaded, engine, Leader(loaded.sharding.mesh, followers))


def model_class_for(module: PreTrainedModel) -> type[ServedModel]:
    """Returns the served model class for `module`: text, transcripts, or embeddings and labels."""
    if is_speech_model(module):
        return SpeechModel
    return ServedModel if module.can_generate() else EncoderModel
