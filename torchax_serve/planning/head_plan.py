"""Plans the forward of a model that writes no text, on devices that need not be here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from model_adapters.errors import InvalidArgumentError, OutOfMemoryError, TorchaxServeError, UnsupportedModelError
from model_adapters.loading.loaded_model import numpy_dtype
from model_adapters.loading.model_source import resolve
from model_adapters.program.model_program import CallSpec
from model_adapters.quantization.loading import describe_weights
from torchax_serve.distributed.mesh import mesh_of
from torchax_serve.distributed.mesh_shape import parse_mesh
from torchax_serve.planning.abstract_model import AbstractModel, Quantization, abstract_model
from torchax_serve.planning.chips import Chip
from torchax_serve.planning.compiled_steps import ProgramReport, compile_traced
from torchax_serve.planning.forward_plan import ForwardPlan, figures_of
from torchax_serve.planning.topology import compiling_for, describe, lowering_platform
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.tasks.batches import MAX_ROWS
from torchax_serve.tasks.checkpoint_readers import CheckpointFiles
from torchax_serve.tasks.plain_forward import inputs_of_noise

DEFAULT_LEN = 512
"""Tokens of a text where no length is given, if the model has so many positions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRequest:
    """Devices and sizes to plan for.

    Attributes:
        topology: Devices, such as ``v6e:2x2``.
        mesh: Sizes of mesh axes, such as ``model=4``; None: all devices on ``model``.
        max_num_seqs: Rows of the forward, rounded down to a power of two, 32 at most.
        max_model_len: Tokens of a text; None: 512, or the model's positions.
        image_size: Width and height of an image before the processor; None: 640 x 480, or the configuration's.
        quantization: As of `abstract_model`.
        refuse_uneven: Whether sizes that would be padded with zeros are an error.
    """

    topology: str
    mesh: str | None = None
    max_num_seqs: int = MAX_ROWS
    max_model_len: int | None = None
    image_size: tuple[int, int] | None = None
    quantization: Quantization = None
    refuse_uneven: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the forward."""
        return min(MAX_ROWS, 1 << (self.max_num_seqs.bit_length() - 1))


@dataclasses.dataclass(frozen=True)
class HeadPlan(ForwardPlan):
    """Result of a plan of one forward; `inputs` has the shapes of its arguments."""

    quantization: str
    inputs: Mapping[str, tuple[int, ...]]

    @property
    def subject(self) -> str:
        """What is computed."""
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.inputs.items())
        return f"a forward of {shapes}" + (f"; {self.quantization}" if self.quantization else "")


def files_of(model: str, *, trust_remote_code: bool = False, **where: Any) -> CheckpointFiles:
    """Returns where the files of a model are, as `empty_module` finds it."""
    source = resolve(model, with_weights=False, with_code=trust_remote_code, **where)
    return CheckpointFiles(source.name, source.folder, trust_remote_code)


def plan_head(module: PreTrainedModel, files: CheckpointFiles, request: HeadRequest) -> HeadPlan:
    """Compiles a forward for the topology of a request, and reports what it needs.

    Args:
        module: The model, on the meta device.
        files: Of its processor.
        request: Devices and sizes.

    Raises:
        TorchaxServeError: topology, mesh, size or model cannot be planned; says why.
    """
    chip, devices = describe(request.topology)
    shape = parse_mesh(request.mesh, len(devices))
    if math.prod(shape.values()) > shape["model"]:
        raise InvalidArgumentError(f"--mesh: expected the axis model alone, got {request.mesh}; leave the others out")
    mesh = mesh_of(devices[: shape["model"]], shape)
    model = abstract_model(
        module, mesh, refuse_uneven=request.refuse_uneven, quantization=request.quantization, chip=chip
    )
    inputs = _inputs(module, files, request)
    program, missing = _compiled(model, inputs, chip)
    flops = _flops(module, inputs)
    if flops is None:  # the compiler counts those of one device
        flops = 0.0 if program is None else (program.flops or 0.0) * shape["model"]
    return HeadPlan(
        model=files.name,
        class_name=type(module).__name__,
        dtype=str(module.dtype).removeprefix("torch."),
        topology=request.topology,
        mesh=shape,
        quantization=describe_weights(model.weights),  # type: ignore[arg-type]  # shapes and dtypes alone are read
        inputs={name: tuple(each.shape) for name, each in inputs.items()},
        weights_bytes=model.weights_bytes_per_device,
        weights_bytes_of_one_device=model.weights_bytes,
        step_flops=flops,
        **figures_of(chip, program, missing, model.weights_bytes_per_device, flops / shape["model"]),
    )


def _inputs(module: Any, files: CheckpointFiles, request: HeadRequest) -> dict[str, torch.Tensor]:
    """Returns the arguments of a forward on the meta device, floats in the dtype of the model."""
    if module.main_input_name == "input_ids":
        if request.image_size is not None:
            raise InvalidArgumentError("--image-size: expected with a model that reads images, got one of texts")
        positions = getattr(module.config, "max_position_embeddings", None) or DEFAULT_LEN
        length = min(DEFAULT_LEN, positions) if request.max_model_len is None else request.max_model_len
        rows = torch.ones(1, length, dtype=torch.long)
        found = {"input_ids": rows, "attention_mask": rows}
    else:
        if request.max_model_len is not None:
            raise InvalidArgumentError("--max-model-len: expected with a model that reads texts, got another")
        size = None if request.image_size is None else (request.image_size[1], request.image_size[0])
        found = inputs_of_noise(module, files, size)
    return {
        name: torch.empty(
            (request.num_rows, *each.shape[1:]),
            dtype=module.dtype if each.is_floating_point() else each.dtype,
            device="meta",
        )
        for name, each in found.items()
    }


def _flops(module: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> float | None:
    """Returns the operations of a forward, counted by PyTorch; None if it fails without values.

    Masks are left out: code that looks whether they have zeros would fail, and they change no product.
    """
    main = module.main_input_name
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module.eval()(**{main: inputs[main]})
    except Exception:  # whatever its code says of tensors without values
        return None
    return float(counter.get_total_flops())


def _compiled(
    model: AbstractModel, inputs: Mapping[str, torch.Tensor], chip: Chip
) -> tuple[ProgramReport | None, str | None]:
    """Returns the compiler's report about a forward, and None; or None and what does not fit."""
    runtime = ModelRuntime(model.module, model.weights, sharding=model.sharding)  # type: ignore[arg-type]
    everywhere = NamedSharding(model.sharding.mesh, PartitionSpec())
    arrays = {
        name: jax.ShapeDtypeStruct(
            each.shape, numpy_dtype(torch.int32 if each.dtype == torch.int64 else each.dtype), sharding=everywhere
        )
        for name, each in inputs.items()
    }
    names = {id(array): name for name, array in reversed(list(model.weights.items()))}
    owners = {name: names[id(array)] for name, array in model.weights.items()}
    unique = {name: array for name, array in model.weights.items() if owners[name] == name}

    def forward(weights: Any, given: Any) -> Any:
        own = {name: weights[owner] for name, owner in owners.items()}
        fields, _ = runtime.program.forward(own, None, None, given, CallSpec())
        return jax.tree.leaves(fields)

    with compiling_for(chip):
        try:
            report, _ = compile_traced(forward, (unique, arrays), lowering_platform(chip))
        except OutOfMemoryError as error:
            return None, str(error)
        except (TorchaxServeError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # whatever model code raises for want of values
            raise _reads_values(model.module, error) from error
    return report, None


def _reads_values(module: PreTrainedModel, error: Exception) -> UnsupportedModelError:
    lines = str(error).strip().splitlines() or [""]
    return UnsupportedModelError(
        f"plan: expected a model whose forward does not read the values of tensors, got {type(module).__name__} "
        f"({type(error).__name__}: {lines[0][:200]}); measure it where it runs"
    )
