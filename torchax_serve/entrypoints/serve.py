"""`serve`: loads a model and makes it run on JAX."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
from jax.sharding import Mesh

from model_adapters.errors import InvalidArgumentError, IsPipelineError
from model_adapters.loading.gguf_names import split_tag
from model_adapters.loading.model_source import ModelSource, bundle_folder, cached_source, parse_name
from model_adapters.quantization.rules import DENSE, parse_rules
from torchax_serve.compilation import gc_pause
from torchax_serve.compilation.xla_cache import enable_compile_cache, programs_dir
from torchax_serve.distributed import pathways
from torchax_serve.engine.adapters import AdapterOptions
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.start.record import start_folder
from torchax_serve.start.stored_model import stored_model
from torchax_serve.validation.argument_hints import refuses_unknown
from torchax_serve.validation.library_objects import (
    is_cached_pipeline,
    is_other_module,
    is_pipeline,
    is_pipeline_folder,
)

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

    from model_adapters.loading import LoadedModel, Progress
    from torchax_serve.distributed.hosts.options import Hosts


@refuses_unknown
def serve(
    model: str | os.PathLike[str] | torch.nn.Module | DiffusionPipeline | None = None,
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
    adapter: str | os.PathLike[str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    max_loras: int | None = None,
    max_lora_rank: int | None = None,
    lora_target_modules: Sequence[str] | None = None,
    speculative_config: Mapping[str, Any] | None = None,
) -> ServedModel:
    """Loads a model and makes it run on JAX, its code untouched.

    Returns a `ServedModel`; a `SpeechModel` if it also transcribes; an `EncoderModel`; an `ImageModel` of a pipeline; a
    `ModuleModel` of a module that is no model of transformers.

    Args:
        model: a short name, a hub id, a folder, bundle or GGUF file, a `PreTrainedModel` or any other module, a
            pipeline of diffusers or its folder; None: the embedded model.
        revision, token, local_files_only: branch, tag or commit on the hub; access token; do not use the network.
        dtype: dtype of the weights; "auto" follows the checkpoint.
        trust_remote_code, allow_pickle: run code of the checkpoint; read pickle files if there are no safetensors.
        strict: raise for tensors that the model does not use and for a missing head; else ``load_report`` lists them.
        cache_dir: folder of downloads; None is the hub library's own folder.
        progress, random_weights: shows load and compilation; make up weights, from the configuration alone.
        engine: batching and cache memory; None chooses.
        mesh, tensor_parallel: devices on the axes ``model`` and ``expert``, replicas on ``data``; those on ``model``.
        refuse_uneven: raise for sizes that the devices do not divide; else they are padded with zeros.
        hosts: the hosts that share the model, of which this is the leader; the others call `follow`.
        pack_weights: compress bfloat16 weights to 3/4 of their bytes without loss, on one CPU with AVX and without AMX.
        quantization, requantize: preset ("int8", "int4" ...), file or rules, "none"; round quantized weights again.
        adapter, adapters: folder of a LoRA adapter that is merged; folders by the name in ``SamplingParams.adapter``.
        max_loras, max_lora_rank, lora_target_modules: room for them; None: as `AdapterOptions`.
        speculative_config: short for ``engine=EngineOptions(speculative=speculative_config)``.

    Raises:
        TorchaxServeError: the model cannot be loaded or served; subclass and message say why.
    """
    arguments = _with_engine(locals())  # taken first: they are the only variables yet
    return _serve_pipelines_too(arguments)


def serve_without_pipelines(model: str | os.PathLike[str] | None, **options: Any) -> ServedModel:
    """Works as `serve`; raises IsPipelineError for a pipeline before any download."""
    given = inspect.signature(serve).bind(model, **options)
    given.apply_defaults()
    return _serve(_with_engine(dict(given.arguments)))


def _serve_pipelines_too(arguments: dict[str, Any]) -> ServedModel:
    try:
        return _serve(arguments)
    except IsPipelineError:  # known once the hub has listed the files of the model
        if arguments["hosts"] is not None:
            raise
        with gc_pause.paused():
            return _image_model(arguments)


def _serve(arguments: dict[str, Any]) -> ServedModel:
    """Returns the model of `arguments`, those of `serve` by name.

    Raises:
        IsPipelineError: the hub says that it is a pipeline.
    """
    pathways.connect()
    enable_compile_cache()
    with gc_pause.paused():
        return _recorded_or_loaded(arguments) if arguments["hosts"] is None else _serve_on_hosts(arguments)


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

_OTHERS = ("model", "engine", "mesh", "tensor_parallel", "pack_weights", "adapter")
"""Arguments of `serve` that `load_served_model` takes under the same names."""

_ADAPTERS = ("adapters", "max_loras", "max_lora_rank", "lora_target_modules")
"""Arguments of `serve` about the adapters that requests can name."""

_NOT_RECORDED = (
    "trust_remote_code",
    "allow_pickle",
    "random_weights",
    "mesh",
    "tensor_parallel",
    "refuse_uneven",
    "adapter",
    *_ADAPTERS,
)
"""Arguments of `serve` that, where they are given, always load the torch module."""


_NOT_OF_BUNDLES = (
    "revision",
    "dtype",
    "trust_remote_code",
    "allow_pickle",
    "strict",
    "random_weights",
    "tensor_parallel",
    "refuse_uneven",
    "adapter",
    *_ADAPTERS,
    "quantization",
    "requantize",
)
"""Arguments of `serve` that a bundle cannot follow."""


def _with_engine(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `serve` by name, with all options of the engine in `engine`."""
    if (config := arguments["speculative_config"]) is not None:
        arguments["engine"] = (arguments["engine"] or EngineOptions()).with_speculative(config)
    return arguments


def _recorded_or_loaded(arguments: dict[str, Any]) -> ServedModel:
    """Returns the model of a start record, or loads it.

    Args:
        arguments: Arguments of `serve` by name.
    """
    if _is_pipeline(arguments):
        return _image_model(arguments)
    if is_other_module(arguments["model"]):
        return _module_model(arguments)
    if (bundle := bundle_folder(arguments["model"])) is not None:
        return _bundle_model(bundle, arguments)
    decisive = _decisive(arguments)

    def load() -> ServedModel:
        from torchax_serve.entrypoints.load import load_served_model

        others = {name: arguments[name] for name in _OTHERS}
        others["adapters"] = AdapterOptions.given(**{name: arguments[name] for name in _ADAPTERS})
        loading = {name: arguments[name] for name in _LOADING}
        return load_served_model(
            **others, loading=loading, start_folder_of=functools.partial(start_folder, arguments=decisive)
        )

    if decisive is None:
        return load()
    source, is_latest = _source_here(arguments)
    if source is not None and (folder := start_folder(source, decisive)) is not None:
        # The module has to be that of the record, whatever its branch of the hub has become by then.
        pinned = {} if source.hub_id is None else {"revision": source.revision, "local_files_only": True}
        stored = stored_model(source, folder, functools.partial(_load_checkpoint, arguments, pinned), is_latest)
        if stored is not None:
            return ServedModel(stored, arguments["engine"])
    return load()


def _load_checkpoint(arguments: Mapping[str, Any], pinned: Mapping[str, Any]) -> LoadedModel:
    """Returns the torch module and the weights of a model that was made of a start record."""
    from torchax_serve.entrypoints.load import load_checkpoint

    loading = {**{name: arguments[name] for name in _LOADING}, **pinned}
    return load_checkpoint(arguments["model"], None, arguments["pack_weights"], loading)


def _is_pipeline(arguments: Mapping[str, Any]) -> bool:
    """Returns whether the model is a pipeline of diffusers: an object, folder or cached id."""
    model = arguments["model"]
    is_here = is_pipeline(model) or is_pipeline_folder(model)
    return is_here or is_cached_pipeline(model, arguments["revision"], arguments["cache_dir"])


def _image_model(arguments: Mapping[str, Any]) -> ServedModel:
    from torchax_serve.entrypoints.image_model import load_image_model

    # The annotation is that of language models, which nearly all callers have.
    return cast("ServedModel", load_image_model(arguments))


def _module_model(arguments: Mapping[str, Any]) -> ServedModel:
    """Returns the `ModuleModel` of a module.

    Raises:
        InvalidArgumentError: an argument about what a module in memory has already.
    """
    defaults = inspect.signature(serve).parameters
    for name, value in arguments.items():
        if name != "model" and name in defaults and value != defaults[name].default:
            raise InvalidArgumentError(
                f"{name}: expected no such argument for a {type(arguments['model']).__name__}, which is no model of "
                f"transformers, got {value!r}; leave it out"
            )
    from torchax_serve.entrypoints.module_model import ModuleModel

    return cast("ServedModel", ModuleModel(arguments["model"]))


def _bundle_model(folder: Path, arguments: Mapping[str, Any]) -> ServedModel:
    """Returns the model of a bundle.

    Raises:
        InvalidArgumentError: an argument about what was decided when the bundle was exported.
    """
    defaults = inspect.signature(serve).parameters
    for name in _NOT_OF_BUNDLES:
        if arguments[name] != defaults[name].default:
            raise InvalidArgumentError(
                f"{name}: expected no such argument for a bundle, whose programs and weights were exported, "
                f"got {arguments[name]!r}; leave it out, or serve the model itself"
            )
    from torchax_serve.export.bundle_model import load_bundle

    name, num_replicas = os.fspath(arguments["model"]), _num_replicas(arguments["mesh"])
    return cast("ServedModel", load_bundle(folder, arguments["engine"], name=name, num_replicas=num_replicas))


def _num_replicas(mesh: Mesh | Mapping[str, int] | None) -> int:
    """Returns the number of replicas of a bundle.

    Raises:
        InvalidArgumentError: another axis than data; the other sizes were decided by the export.
    """
    if mesh is None:
        return 1
    sizes = {} if isinstance(mesh, Mesh) else {axis: size for axis, size in mesh.items() if size != 1 or size is True}
    number = sizes.pop("data", 1)
    if sizes or isinstance(mesh, Mesh) or type(number) is not int or number < 1:
        raise InvalidArgumentError(
            "mesh: expected {'data': N} for a bundle, whose programs are for the devices that they were exported for, "
            f"got {mesh}; leave other axes out, or serve the model itself"
        )
    return number


def _serve_on_hosts(arguments: dict[str, Any]) -> ServedModel:
    """Returns a model on several hosts, of which this one is the leader.

    Args:
        arguments: Arguments of `serve` by name.
    """
    from torchax_serve.entrypoints.load import serve_on_hosts

    if _is_pipeline(arguments):
        raise InvalidArgumentError("hosts: expected None for a pipeline, which runs on one host; leave it out")
    if bundle_folder(arguments["model"]) is not None:
        raise InvalidArgumentError("hosts: expected None for a bundle, which runs on one device; leave it out")
    for name in ("adapter", *_ADAPTERS):
        if arguments[name] is not None:
            raise InvalidArgumentError(
                f"{name}: expected one host, got several; merge it with peft, and serve the result"
            )
    given = {name: arguments[name] for name in ("hosts", "model", "engine", "mesh", "tensor_parallel")}
    return serve_on_hosts(**given, loading={name: arguments[name] for name in _LOADING})


def _decisive(arguments: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns the arguments that decide the weights, as text; None for unrecorded starts.

    A caller that has imported transformers has paid for what a record saves, and its scripts may change the model.

    Raises:
        InvalidArgumentError: rules of quantization that are none.
    """
    model, is_callers = arguments["model"], _caller_has_transformers()
    if (engine := arguments["engine"]) is not None and engine.has_draft_model:
        return None  # which is loaded with its module
    if any(arguments[name] for name in _NOT_RECORDED) or not isinstance(model, str | os.PathLike | None):
        return None
    if programs_dir() is None or is_callers or jax.default_backend() != "cpu":
        return None
    found = {name: str(arguments[name]) for name in ("dtype", "strict", "pack_weights", "quantization", "requantize")}
    if arguments["quantization"] not in (None, DENSE):
        found["quantization"] = repr(parse_rules(arguments["quantization"]))  # what a file of rules has now
    return found


@functools.cache
def _caller_has_transformers() -> bool:
    """Returns whether transformers was imported before the first model."""
    return "transformers" in sys.modules


def _source_here(arguments: Mapping[str, Any]) -> tuple[ModelSource | None, Callable[[], bool]]:
    """Returns the source of a model on this machine, and a check that it is the latest.

    Of a model of the hub it is the copy in the hub's cache.
    """
    model, revision = arguments["model"], arguments["revision"]
    source = parse_name(model, revision)
    if isinstance(source, ModelSource):
        return source, lambda: True
    from model_adapters.loading.hub_request import HubRequest, is_latest

    others = {name: arguments[name] for name in ("token", "local_files_only", "cache_dir")}
    request = HubRequest(source, revision, **others, gguf=split_tag(str(model))[1])
    cached = cached_source(str(model).strip(), request)
    return cached, lambda: cached is not None and is_latest(request, str(cached.revision))
