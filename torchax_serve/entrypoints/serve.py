"""`serve`: loads a model and makes it run on JAX."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from torchax_serve.entrypoints.serve_arguments import ADAPTERS, BUNDLE, DECIDES, LOAD, MODULE, RECORD, ServeArguments
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
    from torchax_serve.entrypoints.image_model import ImageModel
    from torchax_serve.entrypoints.module_model import ModuleModel
    from torchax_serve.export.bundle_encoder import BundleEncoder
    from torchax_serve.export.bundle_module import BundleModule


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
) -> ServedModel | Any:
    """Loads a model and makes it run on JAX, its code untouched.

    Returns a `ServedModel`; a `SpeechModel` if it also transcribes; an `EncoderModel`; an `ImageModel` of a pipeline; a
    `ModuleModel` of a module that is no model of transformers. The last two, and a bundle of a model that writes no
    text, are no `ServedModel`.

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
    options = ServeArguments(**locals()).with_engine()  # taken first: they are the only variables yet
    try:
        return _serve(options)
    except IsPipelineError:  # known once the hub has listed the files of the model
        if options.hosts is not None:
            raise
        from torchax_serve.entrypoints.image_model import load_image_model

        with gc_pause.paused():
            return load_image_model(options)


def serve_without_pipelines(model: str | os.PathLike[str] | None, **options: Any) -> ServedModel | Any:
    """Works as `serve`; raises IsPipelineError for a pipeline before any download."""
    return _serve(ServeArguments(model, **options).with_engine())


def _serve(options: ServeArguments) -> ServedModel | ImageModel | ModuleModel | BundleEncoder | BundleModule:
    """Returns the model of `options`.

    Raises:
        IsPipelineError: the hub says that it is a pipeline.
    """
    pathways.connect()
    enable_compile_cache()
    with gc_pause.paused():
        if options.hosts is not None:
            return _serve_on_hosts(options, options.hosts)
        if _is_pipeline(options):
            from torchax_serve.entrypoints.image_model import load_image_model

            return load_image_model(options)
        if is_other_module(options.model):
            return _module_model(options)
        if (bundle := bundle_folder(options.model)) is not None:
            return _bundle_model(bundle, options)
        return _recorded_or_loaded(options)


def _recorded_or_loaded(options: ServeArguments) -> ServedModel:
    """Returns the model of a start record, or loads it."""
    decisive = _decisive(options)
    if decisive is not None:
        source, is_latest = _source_here(options)
        if source is not None and (folder := start_folder(source, decisive)) is not None:
            # The module has to be that of the record, whatever its branch of the hub has become by then.
            pinned = {} if source.hub_id is None else {"revision": source.revision, "local_files_only": True}
            load = functools.partial(_load_checkpoint, options, pinned)
            if (stored := stored_model(source, folder, load, is_latest)) is not None:
                return ServedModel(stored, options.engine)
    from torchax_serve.entrypoints.load import load_served_model

    return load_served_model(
        options.model,
        options.engine,
        options.mesh,
        options.tensor_parallel,
        options.pack_weights,
        options.to(LOAD),
        None if decisive is None else functools.partial(start_folder, arguments=decisive),
        options.adapter,
        AdapterOptions.given(**options.to(ADAPTERS)),
    )


def _load_checkpoint(options: ServeArguments, pinned: Mapping[str, Any]) -> LoadedModel:
    """Returns the torch module and the weights of a model that was made of a start record."""
    from torchax_serve.entrypoints.load import load_checkpoint

    return load_checkpoint(options.model, None, options.pack_weights, {**options.to(LOAD), **pinned})


def _is_pipeline(options: ServeArguments) -> bool:
    """Returns whether the model is a pipeline of diffusers: an object, folder or cached id."""
    model = options.model
    is_here = is_pipeline(model) or is_pipeline_folder(model)
    return is_here or is_cached_pipeline(model, options.revision, options.cache_dir)


def _module_model(options: ServeArguments) -> ModuleModel:
    """Returns the `ModuleModel` of a module.

    Raises:
        InvalidArgumentError: an argument about what a module in memory has already.
    """
    for name, value in options.refused_by(MODULE).items():
        raise InvalidArgumentError(
            f"{name}: expected no such argument for a {type(options.model).__name__}, which is no model of "
            f"transformers, got {value!r}; leave it out"
        )
    from torchax_serve.entrypoints.module_model import ModuleModel

    return ModuleModel(
        options.model,
        quantization=options.quantization,
        mesh=options.mesh,
        tensor_parallel=options.tensor_parallel,
    )


def _bundle_model(folder: Path, options: ServeArguments) -> ServedModel | BundleEncoder | BundleModule:
    """Returns the model of a bundle.

    Raises:
        InvalidArgumentError: an argument about what was decided when the bundle was exported.
    """
    for name, value in options.refused_by(BUNDLE).items():
        raise InvalidArgumentError(
            f"{name}: expected no such argument for a bundle, whose programs and weights were exported, "
            f"got {value!r}; leave it out, or serve the model itself"
        )
    from torchax_serve.export.bundle_model import load_bundle

    return load_bundle(folder, options.engine, name=os.fspath(options.model), num_replicas=_num_replicas(options.mesh))


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


def _serve_on_hosts(options: ServeArguments, hosts: Hosts) -> ServedModel:
    """Returns a model on several hosts, of which this one is the leader."""
    from torchax_serve.entrypoints.load import serve_on_hosts

    if _is_pipeline(options):
        raise InvalidArgumentError("hosts: expected None for a pipeline, which runs on one host; leave it out")
    if bundle_folder(options.model) is not None:
        raise InvalidArgumentError("hosts: expected None for a bundle, which runs on one device; leave it out")
    for name, value in ({"adapter": options.adapter} | options.to(ADAPTERS)).items():
        if value is not None:
            raise InvalidArgumentError(
                f"{name}: expected one host, got several; merge it with peft, and serve the result"
            )
    return serve_on_hosts(hosts, options.model, options.engine, options.mesh, options.tensor_parallel, options.to(LOAD))


def _decisive(options: ServeArguments) -> dict[str, str] | None:
    """Returns the options that decide the weights, as text; None for unrecorded starts.

    A caller that has imported transformers has paid for what a record saves, and its scripts may change the model.

    Raises:
        InvalidArgumentError: rules of quantization that are none.
    """
    if options.engine is not None and options.engine.has_draft_model:
        return None  # which is loaded with its module
    if options.refused_by(RECORD) or not isinstance(options.model, str | os.PathLike | None):
        return None
    if programs_dir() is None or _caller_has_transformers() or jax.default_backend() != "cpu":
        return None
    found = {name: str(value) for name, value in options.to(DECIDES).items()}
    if options.quantization not in (None, DENSE):
        found["quantization"] = repr(parse_rules(options.quantization))  # what a file of rules has now
    return found


@functools.cache
def _caller_has_transformers() -> bool:
    """Returns whether transformers was imported before the first model."""
    return "transformers" in sys.modules


def _source_here(options: ServeArguments) -> tuple[ModelSource | None, Callable[[], bool]]:
    """Returns the source of a model on this machine, and a check that it is the latest.

    Of a model of the hub it is the copy in the hub's cache.
    """
    source = parse_name(options.model, options.revision)
    if isinstance(source, ModelSource):
        return source, lambda: True
    from model_adapters.loading.hub_request import is_latest

    request = options.hub_request(source, gguf=split_tag(str(options.model))[1])
    cached = cached_source(str(options.model).strip(), request)
    return cached, lambda: cached is not None and is_latest(request, str(cached.revision))
