"""Loader of models: an empty torch module, and its weights as JAX arrays.

The model is given by name, folder or object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from transformers import GenerationConfig, PreTrainedModel

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import (
    CheckpointError,
    InvalidArgumentError,
    OutOfMemoryError,
    TorchaxServeError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from model_adapters.loading import random_weights as random_init
from model_adapters.loading.custom_generate import attach_own_generate
from model_adapters.loading.file_names import CONFIG
from model_adapters.loading.formats.gguf_checkpoint import GgufCheckpoint
from model_adapters.loading.formats.placement import StoredWeights
from model_adapters.loading.loaded_model import LoadedModel, numpy_dtype, report_of
from model_adapters.loading.memory import PeakMemory, check_fits
from model_adapters.loading.model_class import find_class, module_of, torch_dtype_of
from model_adapters.loading.model_files import AnyCheckpoint, ModelFiles, dense_note, made_dense_in
from model_adapters.loading.model_source import ModelSource, resolve
from model_adapters.loading.progress import Progress, SilentProgress
from model_adapters.loading.shared_weights import share_weights, without_adapters
from model_adapters.loading.tensor_match import TensorMatch, logger, smaller_classes, without_missing_parts
from model_adapters.loading.weight_sink import DevicePlacement, DevicePut, WeightSink, meta_like
from model_adapters.ops import memory_layout
from model_adapters.ops.compressed_weight import Weight
from model_adapters.quantization.loading import WeightQuantizer
from model_adapters.quantization.rules import QuantizationRules, parse_rules
from model_adapters.quantization.selection import Selection
from model_adapters.sharding.model_sharding import ModelSharding


def load_model(
    model: str | os.PathLike[str] | PreTrainedModel | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool | None = None,
    dtype: Any = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    random_weights: bool = False,
    seed: int = 0,
    device_put: DevicePut | None = None,
    mesh: Mesh | None = None,
    refuse_uneven: bool = False,
    quantization: Any = None,
    requantize: bool = False,
) -> LoadedModel:
    """Loads a transformers model: weights as JAX arrays, the module on the meta device.

    Args:
        model: What `resolve` accepts, or a `PreTrainedModel` in main memory (also in a ``PeftModel``), to share.
        revision, token, local_files_only, cache_dir: See `resolve`.
        dtype: Of floating-point weights; "auto": as the configuration or the files. What the architecture keeps in
            float32 stays so.
        trust_remote_code: Run the Python code of the repository.
        allow_pickle: Load tensors (nothing else) from pickle files where there is no safetensors file.
        strict: Raise for tensors that the class has no place for, and for a missing head; else one line is logged.
        progress: Shown for download and load.
        random_weights, seed: Read the configuration alone; draw weights from the architecture's own distributions.
        device_put: Places each array, a numpy array or a jax.Array: ``lambda name, x: jax.device_put(x, place(name))``.
        mesh: Devices that share the weights by the model's sharding rules. Not together with `device_put`.
        refuse_uneven: With `mesh`, raise for sizes that would have to be padded with zeros.
        quantization: What `parse_rules` accepts: weights that become so; "none": those of quantized files become dense.
        requantize: Let `quantization` round weights again that are quantized in the files.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError, InvalidArgumentError, OutOfMemoryError: in one line.
    """
    rules = _rules_for(quantization, mesh, device_put)
    shown, torch_dtype = progress or SilentProgress(), torch_dtype_of(dtype)
    model = without_adapters(model)
    if isinstance(model, PreTrainedModel):
        _refuse(revision=revision, random_weights=random_weights or None, dtype=torch_dtype, strict=strict or None)
        return share_weights(model, device_put=device_put, mesh=mesh, refuse_uneven=refuse_uneven, rules=rules)
    files: dict[str, Any] = {"with_code": trust_remote_code, "allow_pickle": allow_pickle, "cache_dir": cache_dir}
    files |= {"revision": revision, "token": token, "local_files_only": local_files_only}
    source = resolve(model, progress=shown, with_weights=not random_weights, **files)
    if source.kind == "config" and not random_weights:
        raise InvalidArgumentError(
            f"{source.name} is a configuration without weights: pass its folder, or random_weights=True"
        )
    with _memory_running_out(source.name):
        builder = _Builder(source, torch_dtype, trust_remote_code, device_put, mesh, refuse_uneven, rules)
        builder.makes_dense = builder.files.is_made_dense(quantization, requantize)
        if random_weights:
            return builder.with_random_weights(seed, shown)
        return builder.from_checkpoint(allow_pickle, strict, shown)


def _rules_for(quantization: Any, mesh: Mesh | None, device_put: DevicePut | None) -> QuantizationRules | None:
    """Returns the quantization rules for weights with this placement.

    Raises:
        InvalidArgumentError: two ways to place weights; rules that are none.
        UnsupportedArgumentError: weights that are quantized cannot be placed so.
    """
    if mesh is not None and device_put is not None:
        raise InvalidArgumentError("mesh and device_put: expected one of them, got both; leave one out")
    rules = parse_rules(quantization)
    if rules is not None and device_put is not None:
        raise UnsupportedArgumentError(
            "quantization: expected a mesh or one device, got device_put, which places dense arrays; leave it out"
        )
    return rules


def _refuse(**given: Any) -> None:
    """Raises InvalidArgumentError for an argument, not None, that a loaded model excludes."""
    if wrong := [name for name, value in given.items() if value is not None]:
        raise InvalidArgumentError(f"{wrong[0]} was given with a loaded model, which has its own: leave it out")


@contextlib.contextmanager
def _memory_running_out(name: str) -> Iterator[None]:
    """Raises errors that say that memory ran out as an OutOfMemoryError that names `name`."""
    try:
        yield
    except TorchaxServeError:
        raise
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfMemoryError(f"memory ran out while loading {name}: {str(error).splitlines()[0]}") from error
        raise


class _Builder:
    """Builder of one model: configuration, class, module, weights."""

    def __init__(
        self,
        source: ModelSource,
        dtype: torch.dtype | None,
        trust_remote_code: bool,
        device_put: DevicePut | None,
        mesh: Mesh | None,
        refuse_uneven: bool,
        rules: QuantizationRules | None,
    ) -> None:
        assert source.path is not None
        self._source, self._trust = source, trust_remote_code
        self._device_put, self._mesh, self._refuse_uneven = device_put, mesh, refuse_uneven
        self._sharding: ModelSharding | None = None
        self._rules, self.makes_dense = rules, False
        self._quantizer: WeightQuantizer | None = None
        self._allow_pickle = False
        self._match: TensorMatch | None = None
        self._peak, self._start = PeakMemory(), time.perf_counter()
        self.files = ModelFiles.of(source, trust_remote_code=trust_remote_code)
        config = self.files.config
        self._class, self._config = find_class(config, folder=source.folder, trust_remote_code=trust_remote_code)
        said: Any = config.dtype or self._config.dtype
        self._dtype: torch.dtype | None = dtype if dtype is not None else said

    def _placement(self) -> DevicePlacement:
        """Returns the placement of the arrays; lays the class out on the mesh, if there is one."""
        if self._mesh is None and self._rules is None and jax.default_backend() not in memory_layout.PLATFORMS:
            return DevicePlacement(self._device_put, stored=StoredWeights(None, self.makes_dense))
        empty = module_of(self._class, self._config, self._dtype or torch.float32)
        if self._mesh is not None:
            self._sharding = ModelSharding.of(empty, self._mesh, refuse_uneven=self._refuse_uneven)
        if self._rules is not None:
            self._quantizer = WeightQuantizer(Selection.of(empty, self._rules), self._sharding)
        put = self._device_put if self._sharding is None else self._sharding.put
        stored = StoredWeights(self._sharding, self.makes_dense)
        return DevicePlacement(put, self._quantizer, stored=stored, experts=memory_layout.experts_by_output(empty))

    def from_checkpoint(self, allow_pickle: bool, strict: bool, progress: Progress) -> LoadedModel:
        """Returns the model with the weights of the files."""
        assert self._source.path is not None
        self._allow_pickle = allow_pickle
        checkpoint = self.files.checkpoint(self._class, self._config, allow_pickle=allow_pickle)
        dtype = self._checked(self._dtype or checkpoint.dtype or torch.float32)
        self._check_fits(list(checkpoint.sizes_in(dtype).values()), dtype)
        module, place, sink = self._read(checkpoint, dtype, strict, progress)
        weights = harvest(module, place, sink)
        loaded = self._loaded(module, weights, dtype, checkpoint.num_bytes)
        assert self._match is not None
        if note := self._match.note(self._source.name, type(module).__name__):
            logger.warning("%s", note)
        self._match.log_names()
        made_dense = made_dense_in(checkpoint)
        loaded = dataclasses.replace(loaded, report=dataclasses.replace(loaded.report, made_dense=made_dense))
        for line in filter(None, (dense_note(made_dense) if made_dense else "", loaded.report.requantized)):
            logger.warning("%s: %s", self._source.name, line)
        return loaded

    def _read(
        self, checkpoint: AnyCheckpoint, dtype: torch.dtype, strict: bool, progress: Progress
    ) -> tuple[PreTrainedModel, DevicePlacement, WeightSink]:
        """Returns the largest module whose tensors are all in the files.

        It is that of the class, or a part of it. The placement and the loaded weights are returned, too.

        Raises:
            CheckpointError: tensors are missing that no part can be without; with `strict`, any that do not correspond.
        """
        module, place, sink = self._read_class(checkpoint, dtype, progress)
        first = self._match = TensorMatch.of(module, sink.taken())
        if strict and (first.missing or first.unused) and not first.faults:
            raise first.strict_error(self._source.name)
        if first.faults:
            raise first.error(self._source.name)
        if not first.missing:
            return module, place, sink
        part = without_missing_parts(module, first.missing)
        if part is not None and (part is module or self._mesh is None):
            return part, place, sink
        full_class, smaller = self._class, smaller_classes(self._class, self._config.model_type)
        for self._class in [type(part)] if part is not None else smaller if module.base_model is module else []:
            module, place, sink = self._read_class(checkpoint, dtype, progress)
            match = TensorMatch.of(module, sink.taken())
            if not match.faults and without_missing_parts(module, match.missing) is module:
                self._match = TensorMatch(first.class_name, first.missing, match.unused, ())
                return module, place, sink
        self._class = full_class
        raise first.error(self._source.name)

    def _read_class(
        self, checkpoint: AnyCheckpoint, dtype: torch.dtype, progress: Progress
    ) -> tuple[PreTrainedModel, DevicePlacement, WeightSink]:
        place = self._placement()
        names = checkpoint.parameter_names if isinstance(checkpoint, GgufCheckpoint) else checkpoint.sizes_in(None)
        sink = WeightSink(place, self._peak, names)
        with (
            progress.stage(f"loading {self._source.name}", checkpoint.num_bytes) as advance,
            checkpoint.readers(advance) as readers,
            sink.hooked(),
        ):
            module = self._from_pretrained(readers, dtype)
        return module, place, sink

    def with_random_weights(self, seed: int, progress: Progress) -> LoadedModel:
        """Returns the model with weights drawn from its initial distributions."""
        dtype = self._checked(self._dtype or torch.float32)
        place = self._placement()
        sink, init = WeightSink(place, self._peak), random_init.RandomInit(seed)
        while True:
            with sink.hooked(), init.recording():
                module = self._from_pretrained({}, dtype)
            if init.has_recorded(module):
                break
        sizes = [tensor.numel() * tensor.element_size() for tensor in set(named_tensors(module).values())]
        self._check_fits(list(sizes), dtype)
        planned = random_init.planned_dtypes(module, dtype)
        std = getattr(self._config.get_text_config(), "initializer_range", None) or 0.02
        with progress.stage(f"drawing random weights for {self._source.name}", sum(sizes)) as advance:

            def fill(name: str, tensor: torch.Tensor) -> Weight:
                wanted = planned.get(name, tensor.dtype)
                on_device = jax.default_backend() != "cpu"
                values = (
                    init.draw(name, tensor, wanted, std, on_device=on_device) if tensor.is_meta else tensor.to(wanted)
                )
                advance(tensor.numel() * tensor.element_size())
                self._peak.sample()
                return place(name, values) if isinstance(values, torch.Tensor) else place.of_array(name, values)

            weights = harvest(module, place, sink, fill)
        return self._loaded(module, weights, dtype, None)

    def _check_fits(self, sizes: list[int], dtype: torch.dtype) -> None:
        """Raises OutOfMemoryError if tensors of `sizes` bytes (less if quantized) do not fit."""
        total = sum(sizes)
        if self._rules is not None:
            empty = module_of(self._class, self._config, dtype)
            total -= Selection.of(empty, self._rules).saved_bytes(empty)
        on_one_device = self._device_put is None and self._mesh is None
        check_fits(
            total, max(sizes), what=self._source.name, device=jax.local_devices()[0], on_one_device=on_one_device
        )

    def _checked(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.float64:
            return torch.float32  # JAX has no 64-bit types unless told otherwise
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedModelError(
                f"{self._source.name} is in {dtype}, expected float32, bfloat16 or float16: pass dtype='bfloat16'"
            )
        return dtype

    def _from_pretrained(self, readers: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
        try:
            # Files of weights that a class names itself are not looked for on the hub.
            return self._class.from_pretrained(
                None, config=self._config, state_dict=readers, dtype=dtype, local_files_only=True
            )
        except (TorchaxServeError, MemoryError):
            raise
        except Exception as error:  # code of an architecture meets a configuration it was not written for
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(
                f"{self._class.__name__} cannot be built from the configuration of {self._source.name} "
                f"({type(error).__name__}: {lines[0]}): check config.json"
            ) from error

    def _loaded(
        self, module: PreTrainedModel, weights: dict[str, Weight], dtype: torch.dtype, checkpoint_bytes: int | None
    ) -> LoadedModel:
        folder = self._source.folder
        module.config.name_or_path = module.name_or_path = str(
            self._source.hub_id or self._source.gguf or self._source.path
        )
        if module.can_generate() and folder is not None:
            module.generation_config = generation_config_of(folder, module)
            if self._trust:
                attach_own_generate(module, folder)
        jax.block_until_ready(weights)
        took = time.perf_counter() - self._start
        report = report_of(weights, self._peak, self._source, took, checkpoint_bytes, self._match, self._quantizer)
        generation = module.generation_config if module.can_generate() else None
        return LoadedModel(
            module,
            weights,
            self._source,
            module.config,
            generation,
            numpy_dtype(dtype),
            report,
            self._trust,
            self._sharding,
            self._allow_pickle,
        )


def harvest(module: PreTrainedModel, place: DevicePlacement, sink: WeightSink, fill: Any = None) -> dict[str, Weight]:
    """Returns the arrays of all tensors of `module`, and leaves only meta tensors on it.

    `fill` returns the array of a tensor that is not in the sink; without it such a tensor must have values.
    """
    by_tensor: dict[int, tuple[torch.Tensor, torch.Tensor, Weight]] = {}  # kept alive: ids must stay unique
    weights: dict[str, Weight] = {}
    for name, tensor in named_tensors(module).items():
        array = sink.array_for(tensor)
        if array is None and id(tensor) in by_tensor:
            _, empty, array = by_tensor[id(tensor)]
            _set(module, name, empty)
        elif array is None:
            if fill is None and tensor.is_meta and not tensor.ndim and not _is_registered(module, name):
                continue  # a scalar that is no buffer: transformers leaves it without a value, and no code reads it
            if fill is None and tensor.is_meta:
                raise UnsupportedModelError(
                    f"{type(module).__name__} has a tensor {name} that neither the files nor its initialisation fill: "
                    "load it with transformers and pass the object"
                )
            array = place(name, tensor) if fill is None else fill(name, tensor)
            empty = tensor if tensor.is_meta else meta_like(tensor)
            by_tensor[id(tensor)] = tensor, empty, array
            if empty is not tensor:
                _set(module, name, empty)
        weights[name] = array
    return weights


def _is_registered(module: torch.nn.Module, name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    return attribute in owner._parameters or attribute in owner._buffers


def _set(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(path) if path else module, attribute, value)


def generation_config_of(folder: Path, module: PreTrainedModel) -> GenerationConfig:
    """Returns the generation config that ``from_pretrained`` would return.

    It is that of its own file, else of the settings in ``config.json``.
    """
    try:
        if (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
        return GenerationConfig.from_pretrained(
            folder, config_file_name=CONFIG, local_files_only=True, _from_model_config=True
        )
    except Exception as error:  # it checks its values with several kinds of exception
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{folder / 'generation_config.json'} is not a generation configuration ({lines[0]}): correct or remove it"
        ) from error
