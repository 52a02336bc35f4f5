"""Compiled methods of one module, torch tensors in and out."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_adapters.bridge.device_tensor import DeviceTensor
from model_adapters.bridge.host_arrays import check_floats
from model_adapters.bridge.views import is_view, jax_view, named_tensors, to_jax_array, to_torch_tensor, torchax
from model_adapters.diffusion import stored_tensors
from model_adapters.errors import TorchaxServeError, UnsupportedArgumentError, UnsupportedModelError
from model_adapters.jax_settings import programs_run
from model_adapters.lowerings.missing import line_of, missing_operators
from model_adapters.ops import spmd
from model_adapters.ops.compressed_weight import Weight
from model_adapters.program.module_program import Constant, ModuleCall, ModuleProgram
from model_adapters.program.module_watch import ModuleWatch, Structure
from model_adapters.program.static_tensors import StaticTensor, can_be_static
from model_adapters.quantization.loading import quantize_weights
from model_adapters.quantization.rules import QuantizationRules
from sharding_rules import TensorPlacement
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.modules.checks import check_module
from torchax_serve.runtime.call_arguments import check_surroundings
from torchax_serve.runtime.module_changes import weights_of

logger = logging.getLogger("torchax_serve")

METHODS = ("forward", "encode", "decode")
"""Methods that run on JAX, where a class of diffusers has them; of another module its forward."""
VARYING = ("timestep", "timesteps", "sigma", "t", "guidance", "sample", "hidden_states")
"""Arguments of diffusers that differ from step to step: numbers become arrays, and no tensor a constant."""
NUM_EARLIER = 4
"""Structures of a module whose programs are kept: processors of an edit and without one, and some more."""
_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


_Kinds = dict[str, tuple[tuple[int, ...], Any]]
"""Shape and dtype of each weight."""


class ModulePrograms(NamedTuple):
    """Programs of one structure of a module, and which calls have code that reads values."""

    programs: ExecutableCache
    program: ModuleProgram
    functions: dict[str, CachedFunction]
    reads_values: set[Any]


class ModuleRuntime:
    """Runs methods of `module` on JAX.

    Args:
        module: A module on the CPU.
        weights: Arrays and quantized weights by name; None: the module's tensors, in shared memory on a CPU.
        programs: Cache of its programs; None: one in memory.
        mesh: Devices that share `weights`; None: one.
        stays_on_device: Whether tensors of results are `DeviceTensor`, rather than copies on the CPU.
        placed: How `weights` lie on `mesh`.
        is_diffusers: Whether it is a module of diffusers.
        rules: Which weights are stored quantized; None: none.

    Attributes:
        stays_on_device: As above.
        weights: Arrays by name.
        programs: Cache of its programs, which counts traces.
        num_changes: Changes of the module that calls have taken over.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        weights: Mapping[str, Weight] | None = None,
        programs: ExecutableCache | None = None,
        mesh: Mesh | None = None,
        stays_on_device: bool = False,
        placed: Mapping[str, TensorPlacement] | None = None,
        *,
        is_diffusers: bool = True,
        rules: QuantizationRules | None = None,
    ) -> None:
        self._varying = VARYING if is_diffusers else ()
        self._is_diffusers = is_diffusers
        self.weights: dict[str, Any] = dict(arrays_of(module) if weights is None else weights)
        self._rules = rules
        if rules is not None:
            quantize_weights(module, self.weights, rules)
        self.module, self._mesh, self._placements = module, mesh, placed
        self.stays_on_device = stays_on_device
        self._lock = threading.RLock()
        self._earlier: list[tuple[tuple[Structure, _Kinds], ModulePrograms]] = []
        self.watch, self.num_changes = ModuleWatch(module), 0
        self._shapes: dict[Any, list[tuple[int, ...]]] = {}  # of results, by calls
        self._set_up(programs or ExecutableCache(mesh=mesh))

    def _set_up(self, programs: ExecutableCache) -> None:
        """Makes everything that depends on the structure of the module."""
        self.programs = programs
        program = ModuleProgram(
            self.module, self._method_of_class, self._mesh, self._placements, is_diffusers=self._is_diffusers
        )
        self._program, self._noted = program, set[str]()  # attributes whose tensors are known to change nothing
        self._functions = {name: CachedFunction(programs, name, _named(program.run, name)) for name in METHODS}
        self._reads_values: set[Any] = set()  # calls whose code reads values of integers and masks

    def _method_of_class(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(type(self.module)._torch_class, name)  # type: ignore[attr-defined]
        return method

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a method, with torch tensors.

        Raises:
            UnsupportedArgumentError: an argument that is neither a tensor nor a constant; names it.
            UnsupportedModelError: code that cannot be traced.
        """
        check_surroundings()
        with self._lock, programs_run():
            self._follow_module()
            args, kwargs = self._numbers_as_tensors(method, args, kwargs)
            result, stored = self._run(self._functions[method], method, args, kwargs)
            if not (self._is_diffusers or self._program.kept <= self._noted):
                self._check_stateless(method, args, kwargs)
            stored_tensors.append(self.module, jax.tree.map(host_tensor, stored))
        as_tensor = self._device_tensor if self.stays_on_device else host_tensor
        return jax.tree.map(as_tensor, result, is_leaf=lambda leaf: isinstance(leaf, Constant))

    def function_of(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[[Any, list[jax.Array]], Any], list[jax.Array]]:
        """Returns the function of weights and arrays that a call runs, to be traced, and its arrays.

        It returns a pytree of arrays and `Constant`, and raises if the code reads values of tensors.
        """
        with self._lock:
            self._follow_module()
            spec, arrays = self._split(method, *self._numbers_as_tensors(method, args, kwargs), reads_values=False)
            program = self._program
        return lambda weights, arrays: program.run(weights, arrays, spec)[0], arrays

    def shapes_of(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
        """Returns the shapes of the tensors of a method's result, which is traced and not run."""

        def traced(weights: Any, arrays: list[jax.Array], *, spec: ModuleCall) -> Any:
            key = (spec, tuple((array.shape, array.dtype) for array in arrays))
            if key not in self._shapes:
                found, _ = jax.eval_shape(functools.partial(self._program.run, spec=spec), weights, arrays)
                self._shapes[key] = [tuple(leaf.shape) for leaf in jax.tree.leaves(found)]
            return self._shapes[key], {}

        with self._lock:
            shapes, _ = self._run(traced, method, args, kwargs)
        return list(shapes)

    def _device_tensor(self, array: Any) -> Any:
        """Returns a float array as a `DeviceTensor` on one device; others on the host."""
        if not isinstance(array, jax.Array) or not jax.numpy.issubdtype(array.dtype, jax.numpy.floating):
            return host_tensor(array)
        return DeviceTensor.of(array if self._mesh is None else jax.device_put(array, jax.devices()[0]))

    def _follow_module(self) -> None:
        """Takes over what has changed on the module, such as weights, an adapter, or tiling."""
        if (change := self.watch.change()) is None:
            return
        check_module(type(self.module).__name__, self.module)
        check_floats(self.module)
        if self._mesh is not None:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} has changed ({change.what}), and its weights lie on a mesh of devices: "
                "change it before serve"
            )
        before = self.watch.structure, _kinds(self.weights)
        self.weights = weights_of(self.module, self.weights, change)
        if self._rules is not None:
            quantize_weights(self.module, self.weights, self._rules)
        self.watch.take()
        self.num_changes += 1
        self._shapes.clear()
        if change.is_structural:
            self._change_structure(before)

    def _change_structure(self, before: tuple[Structure, _Kinds]) -> None:
        """Stores the programs of a structure and restores or makes those of the present one."""
        now = self.watch.structure, _kinds(self.weights)
        if before == now:  # new attention processors like those of before
            return
        made = ModulePrograms(self.programs, self._program, self._functions, self._reads_values)
        self._earlier = [*self._earlier, (before, made)][-NUM_EARLIER:]
        for index, (earlier, made) in enumerate(self._earlier):
            if earlier == now:
                self.programs, self._program, self._functions, self._reads_values = made
                self._noted = set()
                del self._earlier[index]
                return
        self._set_up(ExecutableCache())  # its code is not that of the files

    def _numbers_as_tensors(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with tensors in place of numbers that differ from step to step."""
        names = list(inspect.signature(self._method_of_class(method)).parameters)[1:]

        def taken(name: str, value: Any) -> Any:
            is_number = type(value) in (int, float) or isinstance(value, np.number)
            return torch.tensor(value) if is_number and name in self._varying else value

        named = [taken(names[i] if i < len(names) else "", value) for i, value in enumerate(args)]
        return tuple(named), {name: taken(name, value) for name, value in kwargs.items()}

    def _run(
        self, function: Callable[..., Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, list[Any]]]:
        """Returns the result of a method, and what its attention processors have stored.

        Args:
            function: Runs or traces it: ``function(weights, arrays, spec=...)``.
            method: Name of the method.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        spec, arrays = self._split(method, args, kwargs, reads_values=False)
        arrays = self._placed(arrays)
        kind = (spec, tuple((array.shape, str(array.dtype)) for array in arrays))
        if kind not in self._reads_values:
            try:
                return function(self.weights, arrays, spec=spec)
            except (UnsupportedArgumentError, jax.errors.JaxRuntimeError):
                raise
            except Exception as error:  # whatever model code raises for want of values
                first = error
        else:
            first = None
        exact, arrays = self._split(method, args, kwargs, reads_values=True)
        arrays = self._placed(arrays)
        if first is not None and exact == spec:
            raise self._untraceable(method, args, kwargs, first) from first
        try:
            result = function(self.weights, arrays, spec=exact)
        except (TorchaxServeError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            raise self._untraceable(method, args, kwargs, first or error) from error
        self._reads_values.add(kind)
        return result

    def _split(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, reads_values: bool
    ) -> tuple[ModuleCall, list[jax.Array]]:
        """Returns the static part of a call, and the arrays of its tensors.

        Args:
            method: Name of the method.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            reads_values: Whether integers and masks that do not differ from step to step are constants.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path((args, kwargs))
        names = list(inspect.signature(self._method_of_class(method)).parameters)[1:]
        arrays: list[jax.Array] = []
        static: list[tuple[int, type, Any]] = []
        for index, (path, value) in enumerate(leaves):
            name = _argument(path, names)
            if isinstance(value, np.ndarray | np.generic):
                value = torch.as_tensor(value)
            if isinstance(value, torch.Tensor):
                may = reads_values and name not in self._varying and not is_view(value) and can_be_static(value)
                if may:
                    static.append((index, StaticTensor, StaticTensor.of(value)))
                else:
                    arrays.append(jax_view(value) if is_view(value) else to_jax_array(value))
            elif isinstance(value, jax.Array):
                arrays.append(value)
            elif isinstance(value, torch.Generator):
                static.append((index, type(None), None))  # code that draws with it is refused when traced
            elif isinstance(value, _CONSTANTS):
                static.append((index, type(value), value))
            else:
                raise UnsupportedArgumentError(
                    f"{name}: expected tensors, numbers or text for {type(self.module).__name__}.{method} on JAX, got "
                    f"a {type(value).__name__}; leave it out"
                )
        return ModuleCall(method, structure, tuple(static)), arrays

    def _placed(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Returns the arrays where the weights are; a mesh's axis data divides the batch.

        The batch is the first dimension of the first array that has one. Arrays of another one are on every device.
        """
        if self._mesh is None:
            return [jax.device_put(x, jax.devices()[0]) if len(x.devices()) > 1 else x for x in arrays]
        num_rows = next((x.shape[0] for x in arrays if x.ndim), 0)
        rows = PartitionSpec(spmd.row_axis(num_rows, self._mesh))
        return [
            jax.device_put(x, NamedSharding(self._mesh, rows if x.ndim and x.shape[0] == num_rows else PartitionSpec()))
            for x in arrays
        ]

    def _check_stateless(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises UnsupportedModelError if a call leaves what changes the next one.

        It is in attributes of the module; two calls of a copy in PyTorch show it. A table that is computed once changes
        nothing, and is noted.
        """
        names = ", ".join(sorted(self._program.kept)[:3])
        name = type(self.module).__name__
        own_class: Any = type(self.module)._torch_class  # type: ignore[attr-defined]
        copied = own_class.__new__(own_class)
        attributes = {key: value for key, value in vars(self.module).items() if key != "_jax_runtime"}
        copied.__dict__ = copy.deepcopy(attributes, {id(self.module): copied})
        own = self._method_of_class(method)
        with torch.no_grad():
            first, second = (jax.tree.leaves(own(copied, *args, **kwargs)) for _ in range(2))
        tensors = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, torch.Tensor)]
        if not all(a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in tensors):
            raise UnsupportedModelError(
                f"{name}.{method} keeps tensors in {names}, which change its next result, and a compiled program keeps "
                "none; return them, and pass them as arguments"
            )
        self._noted |= self._program.kept
        logger.warning("%s.%s sets %s in PyTorch, and not on JAX: its result is the same", name, method, names)

    def _untraceable(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
        """Returns PyTorch's own error if the call fails there, too; else what is not traceable."""
        own = self._method_of_class(method)
        args, kwargs = jax.tree.map(lambda x: host_tensor(jax_view(x)) if is_view(x) else x, (args, kwargs))
        try:
            with torch.no_grad():
                own(self.module, *args, **kwargs)
        except Exception as theirs:  # whatever its code says about the arguments
            return theirs
        name = f"{type(self.module).__name__}.{method}"
        if isinstance(error, UnsupportedModelError):
            return error
        is_missing = isinstance(error, torchax.tensor.OperatorNotFound)
        missing = missing_operators(functools.partial(own, self.module, *args, **kwargs))
        if missing := [each for each in missing if is_missing or not each.startswith("aten::")]:
            return UnsupportedModelError(
                f"{name}: expected operators that are lowered to JAX, got {', '.join(missing)}; write them with "
                "others, or lower them by torchax_serve.lower"
            )
        if isinstance(error, jax.errors.ConcretizationTypeError):
            operator = getattr(error, "torch_operator", "_")
            reader = "one that" if operator.startswith("_") else f"{operator}, which"
            return UnsupportedModelError(
                f"{name}: expected code whose steps do not depend on the values of tensors, got {reader} reads a value "
                f"({line_of(error)}); write it with torch.where, or leave this part in PyTorch"
            )
        lines = str(error).strip().splitlines() or [""]
        return UnsupportedModelError(
            f"{name}: expected code that can be traced, got {type(error).__name__} ({line_of(error)}): "
            f"{lines[0][:200]}; leave this part in PyTorch"
        )


def _kinds(weights: Mapping[str, jax.Array]) -> _Kinds:
    return {name: (array.shape, array.dtype) for name, array in weights.items()}


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns `function` under a name of its own, by which programs are counted and profiled."""

    def run(weights: Any, arrays: Any, spec: Any) -> Any:
        return function(weights, arrays, spec)

    run.__name__ = name
    return run


def _argument(path: tuple[Any, ...], names: list[str]) -> str:
    """Returns the name of the argument in which the leaf at `path` of ``(args, kwargs)`` is."""
    if path[0].idx == 1:
        return str(path[1].key)
    return names[path[1].idx] if path[1].idx < len(names) else f"argument {path[1].idx + 1}"


def arrays_of(module: torch.nn.Module) -> dict[str, jax.Array]:
    """Returns an array for each tensor of `module` by name, one for tied tensors."""
    shared: dict[int, jax.Array] = {}
    found = {}
    for name, tensor in named_tensors(module).items():
        if id(tensor) not in shared:
            shared[id(tensor)] = to_jax_array(tensor)
        found[name] = shared[id(tensor)]
    return found


def host_tensor(array: Any) -> Any:
    """Returns a CPU tensor with a copy of an array, int64 of integers; a constant's value."""
    if isinstance(array, Constant):
        return array.value
    if not isinstance(array, jax.Array):
        return array
    tensor = to_torch_tensor(array)
    return tensor.long() if tensor.dtype == torch.int32 else tensor
