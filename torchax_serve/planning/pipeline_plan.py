"""Plans a pipeline's transformer on devices that need not be here: fit and time bound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.utils.flop_counter import FlopCounterMode

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import CheckpointError, InvalidArgumentError, OutOfMemoryError, UnsupportedModelError
from model_adapters.loading.loaded_model import numpy_dtype
from model_adapters.loading.model_class import torch_dtype_of
from model_adapters.program.module_program import ModuleCall, ModuleProgram
from sharding_rules import TensorPlacement
from torchax_serve.diffusion.sharding import place_tensors
from torchax_serve.distributed.mesh import mesh_of
from torchax_serve.distributed.mesh_shape import parse_mesh
from torchax_serve.planning.compiled_steps import ProgramReport, compile_traced
from torchax_serve.planning.denoiser_inputs import denoiser_inputs
from torchax_serve.planning.forward_plan import ForwardPlan, figures_of
from torchax_serve.planning.topology import compiling_for, describe, lowering_platform
from torchax_serve.validation.library_objects import CLASS


@dataclasses.dataclass(frozen=True)
class PipelinePlan(ForwardPlan):
    """Result of a plan of one denoising step."""

    width: int
    height: int

    unit = "step"
    left_out = "text encoders and the autoencoder are not in these figures"

    @property
    def subject(self) -> str:
        """What is computed."""
        return f"a step of an image of {self.width} x {self.height} pixels"


def plan_transformer(
    model: str, config: Mapping[str, Any], topology: str, mesh: str | None, dtype: str, image_size: str
) -> PipelinePlan:
    """Compiles a denoising step for `topology` and reports what it needs.

    Args:
        model: Name in the report.
        config: Configuration of the transformer.
        topology: Devices, such as ``v6e:2x2``.
        mesh: Sizes of mesh axes, such as ``model=4``; None: all devices on ``model``.
        dtype: Of weights and activations; "auto" is bfloat16.
        image_size: Pixels, such as ``1024x1024``.

    Raises:
        TorchaxServeError: topology, mesh, size or model cannot be planned; says why.
    """
    width, height = parse_image_size(image_size)
    chip, devices = describe(topology)
    shape = parse_mesh(mesh, len(devices))
    if math.prod(shape.values()) > shape["model"]:
        raise InvalidArgumentError(f"--mesh: expected the axis model alone, got {mesh}; leave the others out")
    on_devices = mesh_of(devices[: shape["model"]], shape)
    torch_dtype = torch_dtype_of(dtype) or torch.bfloat16
    module = _on_meta(config, torch_dtype)
    tensors = named_tensors(module)
    placed = place_tensors(
        type(module).__name__, dict(module.config), {name: tuple(x.shape) for name, x in tensors.items()}, shape
    )
    weights = {name: _abstract(x, NamedSharding(on_devices, placed[name].spec)) for name, x in tensors.items()}
    inputs = denoiser_inputs(type(module).__name__, dict(module.config), width, height, torch_dtype)
    weight_bytes = sum(placed[name].bytes_per_device(shape, array.dtype.itemsize) for name, array in weights.items())
    flops = _flops(module, inputs)
    program, missing = _compiled(module, weights, inputs, on_devices, chip, placed)
    return PipelinePlan(
        model=model,
        class_name=type(module).__name__,
        dtype=str(torch_dtype).removeprefix("torch."),
        topology=topology,
        mesh=shape,
        width=width,
        height=height,
        weights_bytes=weight_bytes,
        weights_bytes_of_one_device=sum(array.size * array.dtype.itemsize for array in weights.values()),
        step_flops=flops,
        **figures_of(chip, program, missing, weight_bytes, flops / shape["model"]),
    )


def parse_image_size(text: str) -> tuple[int, int]:
    """Parses ``1024x768`` as width and height in pixels; else raises InvalidArgumentError."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise InvalidArgumentError(f"--image-size: expected WIDTHxHEIGHT such as 1024x1024, got {text!r}; correct it")
    return int(width), int(height)


def _on_meta(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Returns the module of a configuration on the meta device."""
    try:
        import diffusers
    except ImportError as error:
        raise UnsupportedModelError(
            f"plan: expected diffusers for a {config[CLASS]}, got none ({error}); run pip install "
            "'torchax-serve[diffusion]'"
        ) from error
    cls = getattr(diffusers, config[CLASS], None)
    if cls is None:
        raise CheckpointError(f"{CLASS}: expected a class of diffusers, got {config[CLASS]}; correct the configuration")
    with torch.device("meta"):
        # torch's own `to`: that of diffusers warns of what only matters to weights with values.
        return torch.nn.Module.to(cls.from_config(dict(config)), dtype).eval()


def _abstract(tensor: torch.Tensor, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    dtype = {torch.float64: torch.float32, torch.int64: torch.int32}.get(tensor.dtype, tensor.dtype)
    return jax.ShapeDtypeStruct(tensor.shape, numpy_dtype(dtype), sharding=sharding)


def _flops(module: Any, inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> float:
    """Returns the operations of one forward, counted by PyTorch on tensors without values."""
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in inputs.items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(**tensors, return_dict=False)
    return float(counter.get_total_flops())


def _compiled(
    module: Any,
    weights: Mapping[str, Any],
    inputs: Mapping[str, Any],
    mesh: Any,
    chip: Any,
    placed: Mapping[str, TensorPlacement],
) -> tuple[ProgramReport | None, str | None]:
    """Returns the compiler's report about a step, and None; or None and what does not fit."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    arrays = {
        name: jax.ShapeDtypeStruct(shape, numpy_dtype(dtype), sharding=everywhere)
        for name, (shape, dtype) in inputs.items()
    }
    leaves, structure = jax.tree.flatten(((), {**arrays, "return_dict": False}))
    static = tuple((index, bool, leaf) for index, leaf in enumerate(leaves) if leaf is False)
    spec = ModuleCall("forward", structure, static)
    on_mesh = (mesh, placed) if mesh.size > 1 else (None, None)
    program = ModuleProgram(module, lambda name: getattr(type(module), name), *on_mesh)

    def step(weights: Any, given: Any) -> Any:
        return program.run(weights, given, spec)

    with compiling_for(chip):
        try:
            report, _ = compile_traced(
                step, (dict(weights), [leaf for leaf in leaves if leaf is not False]), lowering_platform(chip)
            )
        except OutOfMemoryError as error:
            return None, str(error)
    return report, None
