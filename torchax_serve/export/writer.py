"""Writes bundles: `export_model` makes a new version in a folder, complete by a rename."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading import LoadedModel
from model_adapters.ops import registry
from model_adapters.ops.compressed_weight import CompressedWeight, Weight, Weights, unpacked
from model_adapters.ops.cpu import build, ffi
from model_adapters.ops.memory_layout import experts_by_output
from model_adapters.ops.quantized_weight import QuantizedWeight
from model_adapters.quantization.loading import describe_weights
from torchax_serve import __version__
from torchax_serve.engine.factory import memory_budget
from torchax_serve.engine.options import EngineOptions
from torchax_serve.export.layout import (
    ENGINE_SIZES,
    GENERATION_CONFIG,
    INPUTS_FIRST,
    MODULE,
    TEMPLATE,
    TEXTS,
    TOKENIZER,
    TOOLS_TEMPLATE,
)
from torchax_serve.export.manifest import Manifest, require_flatbuffers, write_manifest
from torchax_serve.export.mesh import described_mesh
from torchax_serve.export.modules import ModuleExporter
from torchax_serve.export.program_writer import ProgramWriter
from torchax_serve.export.steps import StepExporter, not_exportable
from torchax_serve.export.targets import PLATFORMS, ExportTarget, parse_platforms
from torchax_serve.export.texts import TextsExporter
from torchax_serve.export.trees import described_weights
from torchax_serve.export.versions import new_version
from torchax_serve.export.weights import WeightsFormat, check_format, write_weights
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.sampling_params import MAX_LOGPROBS
from torchax_serve.start.model_record import ModelRecord
from torchax_serve.start.recording import NotRecordableError, model_record
from torchax_serve.start.weights_file import named_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to write.

    Attributes:
        platforms: Platforms of the programs: ``cpu``, ``tpu:v6e``, ``cuda:h100`` ...
        engine: Sizes of the engine, which its programs have.
        weights: Format of the weights.
        native: Whether programs for a CPU call the C++ kernels; their sources and the library come with them.
        reference: Whether programs for a CPU come without kernels as well, for processors without a compiler.
        advance: Called with the number of programs written since the last call.
    """

    platforms: Sequence[str] = ("cpu",)
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    weights: WeightsFormat = "safetensors"
    native: bool = True
    reference: bool = True
    advance: Callable[[int], object] = lambda number: None

    def targets(self) -> list[ExportTarget]:
        """Returns what programs are exported for.

        Raises:
            InvalidArgumentError: an unknown platform.
        """
        found = parse_platforms(self.platforms)
        if ExportTarget("cpu") not in found:
            return found
        has_kernels = self.native and ffi.missing() is None
        others = [target for target in found if target != ExportTarget("cpu")]
        on_cpu = [ExportTarget("cpu")] if has_kernels else []
        if self.reference or not has_kernels:
            on_cpu.append(ExportTarget("cpu", uses_kernels=False))
        return [*on_cpu, *others]


def export_model(loaded: LoadedModel, runtime: ModelRuntime, out: Path, request: ExportRequest) -> Manifest:
    """Writes a model as the next version of a bundle; returns its manifest.

    The version appears by a rename once it is complete: readers never see a part of it.

    Args:
        loaded: The model as it was loaded.
        runtime: The same, with its programs.
        out: Folder of the bundle, new or with other versions.
        request: What to write.

    Raises:
        InvalidArgumentError: options that do not fit the model, or a folder with something else in it.
        UnsupportedModelError: requests of the model need more than a bundle has.
        TorchaxServeError: the disk is full, or a package is missing.
    """
    require_flatbuffers()
    check_format(request.weights)
    targets = request.targets()
    weights = _portable(runtime.weights)
    _check_layout(weights, targets)
    if loaded.generation_config is None:
        return _export_texts(loaded, runtime, out, request, targets, weights)
    sizes = _sizes(runtime, request.engine)
    try:
        record, tensors = model_record(loaded, runtime, weights)
    except NotRecordableError as reason:
        raise not_exportable(loaded.module, reason) from reason
    with new_version(out, sum(array.nbytes for array in tensors.values())) as new:
        shapes = {name: _shape_of(array) for name, array in tensors.items()}
        programs = ProgramWriter(record.weights, shapes, new.folder, request.advance)
        exporter = StepExporter(runtime, sizes, programs)
        content = {
            **_versions(),
            "model": _described_model(loaded, record),
            "tokenizer": _described_tokenizer(record),
            "engine": {name: getattr(sizes, name) for name in ENGINE_SIZES},
            "mesh": described_mesh(tensors),
            **_written(new.folder, tensors, programs, request, targets, exporter.export, loaded.module),
        }
        _write_texts(new.folder, loaded, record)
        return new.completed(write_manifest(new.folder, content))


def _export_texts(
    loaded: LoadedModel,
    runtime: ModelRuntime,
    out: Path,
    request: ExportRequest,
    targets: Sequence[ExportTarget],
    weights: dict[str, Weight],
) -> Manifest:
    """Writes a model that reads texts and writes none, as `export_model` does."""
    exporter = TextsExporter.of(loaded, runtime, request.engine)
    tokenizer, described = exporter.tokenizer(loaded)
    names, tensors = named_tensors({**weights, **exporter.pooling_weights})
    with new_version(out, sum(array.nbytes for array in tensors.values())) as new:
        programs = ProgramWriter(
            names, {name: _shape_of(array) for name, array in tensors.items()}, new.folder, request.advance
        )
        config = loaded.config
        content = {
            **_versions(),
            "model": {
                "name": loaded.source.name,
                "class": type(loaded.module).__name__,
                "model_type": config.model_type,
                "dtype": str(loaded.module.dtype).removeprefix("torch."),
                "quantization": loaded.report.quantization,
                "requantized": loaded.report.requantized,
                "config": {"model_type": config.model_type, "num_labels": config.num_labels},
            },
            "tokenizer": described,
            "engine": {"max_model_len": exporter.max_len, "max_num_seqs": exporter.max_rows},
            "mesh": None,
            TEXTS: exporter.described(),
            **_written(
                new.folder,
                tensors,
                programs,
                request,
                targets,
                lambda target: exporter.export(target, programs),
                loaded.module,
            ),
        }
        if tokenizer is not None:
            (new.folder / TOKENIZER).write_text(tokenizer.backend, "utf-8", newline="")
        _copy_licences(new.folder, loaded)
        return new.completed(write_manifest(new.folder, content))


def export_module(exporter: ModuleExporter, out: Path, request: ExportRequest) -> Manifest:
    """Writes a module of any library as `export_model` does a model."""
    require_flatbuffers()
    check_format(request.weights)
    targets = request.targets()
    runtime, described = exporter.runtime, exporter.described()
    weights = _portable(runtime.weights)
    _check_layout(weights, targets)
    names, tensors = named_tensors(weights)
    with new_version(out, sum(array.nbytes for array in tensors.values())) as new:
        programs = ProgramWriter(
            names, {name: _shape_of(array) for name, array in tensors.items()}, new.folder, request.advance
        )
        dtypes = [
            str(array.dtype) for array in tensors.values() if jax.numpy.issubdtype(array.dtype, jax.numpy.floating)
        ]
        content = {
            **_versions(),
            "model": {
                "name": exporter.name,
                "class": type(runtime.module).__name__,
                "model_type": MODULE,
                "dtype": next(iter(dtypes), "float32"),
                "quantization": describe_weights(weights),
                "requantized": "",
                "config": {},
            },
            "tokenizer": None,
            "engine": {},
            "mesh": None,
            MODULE: described,
            **_written(
                new.folder,
                tensors,
                programs,
                request,
                targets,
                lambda target: exporter.export(target, programs),
                runtime.module,
            ),
        }
        return new.completed(write_manifest(new.folder, content))


def _written(
    folder: Path,
    tensors: Mapping[str, jax.Array],
    programs: ProgramWriter,
    request: ExportRequest,
    targets: Sequence[ExportTarget],
    export: Callable[[ExportTarget], dict[str, Any]],
    module: Any,
) -> dict[str, Any]:
    """Writes kernels, programs and weights; returns their parts of the manifest."""
    experts = experts_by_output(module)
    return {
        "native": _write_native(folder) if any(_is_native(target) for target in targets) else None,
        "variants": {target.name: export(target) for target in targets},
        "weights": {
            "format": request.weights,
            "files": write_weights(folder, tensors, request.weights),
            "names": described_weights(programs.names),
            INPUTS_FIRST: sorted(experts.intersection(tensors)),
        },
    }


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = array.sharding if isinstance(array.sharding, jax.sharding.NamedSharding) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _portable(weights: Weights) -> dict[str, Weight]:
    """Returns the weights with compressed ones as arrays, which run on any processor."""
    unique = {id(weight): weight for weight in weights.values()}
    made = {key: unpacked(each) if isinstance(each, CompressedWeight) else each for key, each in unique.items()}
    return {name: made[id(weight)] for name, weight in weights.items()}


def _check_layout(weights: Weights, targets: Sequence[ExportTarget]) -> None:
    """Raises InvalidArgumentError if weights are laid out for other devices than a target's."""
    here = registry.platform()
    other = next((target for target in targets if PLATFORMS[target.platform] != here), None)
    if other is None:
        return
    name = next((name for name, weight in weights.items() if isinstance(weight, QuantizedWeight)), None)
    if name is not None:
        raise InvalidArgumentError(
            f"platforms: expected {here}, for which the quantized weight {name} and others are laid out here, got "
            f"{other.name}; export there, or without quantization"
        )
    if any(isinstance(array.sharding, jax.sharding.NamedSharding) for array in jax.tree.leaves(weights)):
        raise InvalidArgumentError(
            f"platforms: expected {here}, on whose devices the model is divided, got {other.name}; export there, or a "
            "model on one device"
        )


def _sizes(runtime: ModelRuntime, options: EngineOptions) -> MemoryBudget:
    if options.kv_cache_dtype is not None:
        raise InvalidArgumentError(
            f"kv_cache_dtype: expected None for a bundle, whose cache is in the model's dtype, got "
            f"{options.kv_cache_dtype!r}; leave it out"
        )
    if not 0 <= options.max_logprobs <= MAX_LOGPROBS:
        raise InvalidArgumentError(
            f"max_logprobs: expected 0 to {MAX_LOGPROBS} for a bundle, whose programs return so many, got "
            f"{options.max_logprobs}; leave it out"
        )
    return memory_budget(runtime, options)


def _is_native(target: ExportTarget) -> bool:
    return target.platform == "cpu" and target.uses_kernels


def _versions() -> dict[str, Any]:
    names = ("jax", "jaxlib", "torch", "torchax", "transformers")
    return {
        "made_with": {"torchax-serve": __version__, **{name: version(name) for name in names}},
        "made_at": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _described_model(loaded: LoadedModel, record: ModelRecord) -> dict[str, Any]:
    class_name, model_type, dtype = record.described
    return {
        "name": loaded.source.name,
        "class": class_name,
        "model_type": model_type,
        "dtype": dtype,
        "quantization": record.quantization,
        "requantized": record.requantized,
        "config": record.config,
        "config_absent": list(record.config_absent),
        "generation_defaults": record.generation_defaults,
        "sampling_rules": record.sampling_rules,
        "limits": record.limits,
    }


def _described_tokenizer(record: ModelRecord) -> dict[str, Any] | None:
    tokenizer = record.tokenizer
    if tokenizer is None:
        return None
    return {
        "special_tokens_map": tokenizer.special_tokens_map,
        "response_template": tokenizer.response_template,
    }


def _write_texts(folder: Path, loaded: LoadedModel, record: ModelRecord) -> None:
    """Writes tokenizer, chat templates, generation config and licence."""
    written = {GENERATION_CONFIG: json.dumps(record.generation_config, indent=1) + "\n"}
    if record.tokenizer is not None:
        written[TOKENIZER] = record.tokenizer.backend
        plain, for_tools = record.tokenizer.chat_template, record.tokenizer.tools_template
        templates = {TEMPLATE: plain, TOOLS_TEMPLATE: None if for_tools == plain else for_tools}
        written |= {name: text for name, text in templates.items() if text is not None}
    for name, text in written.items():
        (folder / name).write_text(text, "utf-8", newline="")
    _copy_licences(folder, loaded)


def _copy_licences(folder: Path, loaded: LoadedModel) -> None:
    for path in [] if loaded.source.folder is None else sorted(loaded.source.folder.glob("LICENSE*")):
        shutil.copyfile(path, folder / path.name)


def _write_native(folder: Path) -> dict[str, Any]:
    """Writes the kernels' C++ files and the library for this processor."""
    native = folder / "native"
    native.mkdir()
    for path in [*build.sources(), *build.headers()]:
        shutil.copyfile(path, native / path.name)
    machine = build.machine_key()
    shutil.copyfile(build.library_path(), native / f"kernels-{machine}.so")
    return {"targets": list(ffi.TARGETS), "libraries": {machine: f"native/kernels-{machine}.so"}}
