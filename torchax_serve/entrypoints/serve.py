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
) -> ServedModel:
    """Loads a model and makes it run on JAX, its code untouched.

    What comes back knows what the model is for: a `ServedModel` generates, a `SpeechModel` transcribes as well, and
    an `EncoderModel` embeds, classifies and ranks.

    Args:
        model: a short name (``gemma-3-1b-it``), a hub id, a local folder, a loaded `PreTrainedModel`, or None for the
            small model that comes with the package.
        revision: branch, tag or commit on the hub.
        token: access token for gated repositories.
        local_files_only: never touch the network.
        dtype: of the weights; "auto" follows the checkpoint.
        trust_remote_code: run code that comes with the checkpoint.
        allow_pickle: read pickle files where there are no safetensors.
        strict: an error for tensors of the files that the model has no use for, and for a head that they lack. Without
            it both are left out, with one line; ``load_report`` lists them.
        cache_dir: where downloads are kept; None is the hub library's own folder.
        progress: shows download, load and compilation.
        random_weights: make the weights up, from the configuration alone.
        engine: how requests are batched and how much memory their cache may take; None chooses.
        mesh: the devices that share the model: how many along ``model`` and ``expert``, and replicas along ``data``,
            which share the requests; or a mesh with these axes.
        tensor_parallel: the same as ``mesh={"model": tensor_parallel}``.
        refuse_uneven: an error for sizes that the devices do not divide, which are otherwise filled up with zeros.
        hosts: the hosts whose devices share the model, of which this is the leader; the others call `follow`.
        pack_weights: on one CPU with AVX2 or AVX-512 and without AMX, have bfloat16 weights that are read from files
            lie in three quarters of their bytes. No bit of them is lost, and decoding reads less.

    Raises:
        TorchaxServeError: one of its kinds, each saying what was expected, what came, and what to do.
    """
    if hosts is not None and not hosts.is_leader:
        raise InvalidArgumentError(
            f"hosts: expected host_id 0, the leader's, got {hosts.host_id}; call follow() on the other hosts"
        )
    loading: dict[str, Any] = {
        "revision": revision,
        "token": token,
        "local_files_only": local_files_only,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "allow_pickle": allow_pickle,
        "strict": strict,
        "cache_dir": cache_dir,
        "progress": progress,
        "random_weights": random_weights,
        "refuse_uneven": refuse_uneven,
    }
    enable_compile_cache()
    with gc_pause.paused():
        if hosts is None:
            loaded = load_model(model, mesh=mesh_for(mesh, tensor_parallel), **loading)
            if pack_weights:
                prepare_weights(loaded)
            return model_class_for(loaded.module)(loaded, engine)
        with joined(hosts, model, shared_arguments(loading, mesh, tensor_parallel)) as followers:
            loaded = load_model(model, mesh=mesh_of_hosts(hosts, mesh, tensor_parallel), **loading)
            check_same_model(followers, load_digest(loaded))
        assert loaded.sharding is not None
        return model_class_for(loaded.module)(loaded, engine, Leader(loaded.sharding.mesh, followers))


def model_class_for(module: PreTrainedModel) -> type[ServedModel]:
    """The class that has what a model of this kind is asked for: text, transcripts, or embeddings and labels."""
    if is_speech_model(module):
        return SpeechModel
    return ServedModel if module.can_generate() else EncoderModel
