"""`serve`: loads a model and makes it run on JAX."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import jax
from jax.sharding import Mesh

from model_adapters.loading.model_source import ModelSource, parse_name
from torchax_serve.compilation import gc_pause
from torchax_serve.compilation.xla_cache import enable_compile_cache, programs_dir
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.recorded_model import recorded_model, source_folder
from torchax_serve.start.record import StartFolder
from torchax_serve.validation.argument_hints import refuses_unknown

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from model_adapters.loading import Progress
    from torchax_serve.distributed.hosts.options import Hosts
    from torchax_serve.entrypoints.served_model import ServedModel


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
    enable_compile_cache()
    with gc_pause.paused():
        if hosts is None:
            return _serve_on_this_host(arguments)
        from torchax_serve.entrypoints.load import serve_on_hosts

        loading = {name: arguments[name] for name in _LOADING}
        return serve_on_hosts(hosts, model, engine, mesh, tensor_parallel, loading)


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

_NOT_RECORDED = (
    "trust_remote_code",
    "allow_pickle",
    "random_weights",
    "mesh",
    "tensor_parallel",
    "refuse_uneven",
    "quantization",
    "requantize",
)
"""Arguments of `serve` that, where they are given, always load the torch module."""


def _serve_on_this_host(arguments: dict[str, Any]) -> ServedModel:
    """Returns the model of a start record, or loads it.

    Args:
        arguments: Arguments of `serve` by name.
    """
    model, is_plain = arguments["model"], not any(arguments[name] for name in _NOT_RECORDED)
    source = parse_name(model, arguments["revision"]) if is_plain and not _is_object(model) else None
    folder = _start_folder(source, arguments)

    def load() -> ServedModel:
        from torchax_serve.entrypoints.load import load_served_model

        others = {name: arguments[name] for name in ("engine", "mesh", "tensor_parallel", "pack_weights")}
        loading = {name: arguments[name] for name in _LOADING}
        return load_served_model(model, **others, loading=loading, start_folder=folder)

    if folder is not None and isinstance(source, ModelSource):
        recorded = recorded_model(source, folder, arguments["engine"], load)
        if recorded is not None:
            return cast("ServedModel", recorded)
    return load()


def _is_object(model: Any) -> bool:
    return model is not None and not isinstance(model, str | os.PathLike)


def _start_folder(source: ModelSource | str | None, arguments: Mapping[str, Any]) -> StartFolder | None:
    """Returns the place of the start record of a model; None if it has none.

    A process that has imported transformers has paid for what a record saves, and its scripts may change the model.
    """
    folder = None if source is None else source_folder(source)
    if folder is None or programs_dir() is None or "transformers" in sys.modules or jax.default_backend() != "cpu":
        return None
    return StartFolder(folder, {name: str(arguments[name]) for name in ("dtype", "strict", "pack_weights")})
