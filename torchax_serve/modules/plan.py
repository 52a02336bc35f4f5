"""What the program of a module's call takes: bytes and arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from model_adapters.errors import TorchaxServeError, UnsupportedModelError
from model_adapters.ops import registry
from torchax_serve.modules.runtime import ModuleRuntime


@dataclasses.dataclass(frozen=True)
class ModulePlan:
    """The compiled program of a call, in numbers of the compiler.

    Attributes:
        weight_bytes: Weights and buffers, shared ones once.
        argument_bytes: Tensors of the call.
        result_bytes: Tensors of the result.
        temporary_bytes: What the program needs while it runs.
        flops: Multiplications and additions, by the compiler's count of a program without kernels.
        accessed_bytes: Bytes that the operations of that program read and write, by the same count.
    """

    weight_bytes: int
    argument_bytes: int
    result_bytes: int
    temporary_bytes: int
    flops: float
    accessed_bytes: float

    def __str__(self) -> str:
        sizes = {
            "weights": self.weight_bytes,
            "arguments": self.argument_bytes,
            "results": self.result_bytes,
            "temporary": self.temporary_bytes,
            "read and written": self.accessed_bytes,
        }
        lines = [f"{name:17} {size / 1e6:12.3f} MB" for name, size in sizes.items()]
        return "\n".join([*lines, f"{'arithmetic':17} {self.flops / 1e9:12.3f} GFLOP"])


def plan_of(runtime: ModuleRuntime, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> ModulePlan:
    """Returns the plan of ``(args, kwargs)`` of a forward.

    Raises:
        UnsupportedModelError: code that reads values of tensors.
    """
    args, kwargs = call
    function, arrays = runtime.function_of("forward", args, dict(kwargs))

    # The tree of a result has no name for what is no array.
    def compiled_program() -> Any:
        leaves = jax.jit(lambda weights, arrays: jax.tree.leaves(function(weights, arrays)))
        return leaves.lower(runtime.weights, arrays).compile()

    try:
        compiled = compiled_program()
        with registry.use_references():  # the compiler does not look into kernels
            costs = compiled_program().cost_analysis() or {}
    except (TorchaxServeError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # whatever model code raises for want of values
        lines = str(error).strip().splitlines() or [""]
        raise UnsupportedModelError(
            f"plan: expected a module whose code does not read the values of tensors, got "
            f"{type(runtime.module).__name__} ({type(error).__name__}: {lines[0][:200]}); leave this part in PyTorch"
        ) from error
    memory = compiled.memory_analysis()
    return ModulePlan(
        weight_bytes=sum({id(each): each.nbytes for each in runtime.weights.values()}.values()),
        argument_bytes=sum(array.nbytes for array in arrays),
        result_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(compiled.out_info)),
        temporary_bytes=0 if memory is None else memory.temp_size_in_bytes,
        flops=float(costs.get("flops", 0.0)),
        accessed_bytes=float(costs.get("bytes accessed", 0.0)),
    )
