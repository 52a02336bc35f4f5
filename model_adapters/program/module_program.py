"""A module of any library as a pure function of its weights."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import torch
from jax.sharding import Mesh

import pytree_registry
from model_adapters.bridge.views import as_views, default_env, is_view, jax_view, torch_mode, torch_view
from model_adapters.diffusion import attention, stored_tensors
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings import constant_folding, install
from model_adapters.ops import spmd
from model_adapters.ops.compressed_weight import Weights, substituted
from model_adapters.program import shared_layers
from model_adapters.program.static_tensors import StaticTensor
from model_adapters.program.trace_context import torch_promotion, trace_lock
from model_adapters.sharding.sharded_trace import placements_known
from sharding_rules import TensorPlacement

_OF_TORCH = ("_parameters", "_buffers", "_modules")


@dataclasses.dataclass(frozen=True)
class ModuleCall:
    """The static part of a call of a method.

    Attributes:
        method: Name of the method.
        structure: Tree of ``(args, kwargs)``.
        static: Index of a leaf, its type, and its value, for each leaf that is no input of the program.
    """

    method: str
    structure: jax.tree_util.PyTreeDef
    static: tuple[tuple[int, type, Any], ...]

    def arguments(self, arrays: list[jax.Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``(args, kwargs)`` with torch views of `arrays` in the places of the inputs."""
        known = {index: value for index, _, value in self.static}
        inputs = iter(arrays)
        leaves = [
            _constant(known[index]) if index in known else torch_view(next(inputs))
            for index in range(self.structure.num_leaves)
        ]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return args, kwargs


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant:
    """A part of a result that is no tensor, such as a number, for all calls of a program."""

    value: Any

    def __hash__(self) -> int:
        return hash((type(self.value), repr(self.value)))


def _constant(value: Any) -> Any:
    return value.tensor() if isinstance(value, StaticTensor) else value


class ModuleProgram:
    """Runs methods of the unmodified `module` as functions of its weights and of arrays.

    The module is a template: its own tensors are never read.

    Args:
        module: The module.
        forward_of: Returns the method that its class has under a name.
        mesh: Devices for which it is traced; None: one device.
        placed: How each tensor lies on `mesh`, by name.
        is_diffusers: Whether it is a module of diffusers: its attention is this project's op, and what attention
            processors append to lists is a result.

    Attributes:
        kept: Names of attributes in which a trace has left tensors; a compiled program sets none.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward_of: Callable[[str], Callable[..., Any]],
        mesh: Mesh | None = None,
        placed: Mapping[str, TensorPlacement] | None = None,
        *,
        is_diffusers: bool = True,
    ) -> None:
        install.install()
        if is_diffusers:
            attention.install()
        pytree_registry.register_all()  # the modeling file is loaded, with the outputs that it defines
        self.module, self._forward_of, self._mesh = module, forward_of, mesh
        self._placed, self._is_diffusers = placed or {}, is_diffusers
        self.kept: set[str] = set()

    def run(self, weights: Weights, arrays: list[jax.Array], spec: ModuleCall) -> Any:
        """Calls a method; to be traced.

        Args:
            weights: Every tensor of the module by name, in the form in which it is stored.
            arrays: Leaves of the arguments that are not in ``spec.static``, in order.
            spec: The static part of the call.

        Returns:
            The method's result, a pytree with arrays in place of tensors and `Constant` of other leaves; and what
            processors have stored, by path.

        Raises:
            UnsupportedModelError: the code writes into its weights or arguments, or draws random numbers.
        """
        with substituted(weights) as dense:
            return self._run(dense, arrays, spec)

    def _run(self, weights: Mapping[str, jax.Array], arrays: list[jax.Array], spec: ModuleCall) -> Any:
        """Calls a method as `run`, with dense weights from which stored forms can be looked up."""
        lengths = stored_tensors.list_lengths(self.module)
        is_float32 = next((x.dtype == jax.numpy.float32 for x in weights.values() if x.dtype.kind == "f"), True)
        state = torch_view(dict(weights))
        with (
            torch_promotion(),
            trace_lock(),
            attention.active(self.module) if self._is_diffusers else contextlib.nullcontext(),
            restored_state(self.module, self.kept, state.values()),
            torch_mode(self.module, state),
            constant_folding.enabled(),
            # A function that blocks share cannot store what it computes.
            contextlib.nullcontext() if lengths else shared_layers.intercepted(self.module),
            spmd.on_mesh(self._mesh),
            placements_known(self._mesh, {id(weights[name]): each for name, each in self._placed.items()}),
            jax.default_matmul_precision("highest") if is_float32 else contextlib.nullcontext(),
        ):
            args, kwargs = spec.arguments(arrays)
            inside = _inside_arguments(args, kwargs)
            key = default_env().param.prng
            try:
                result = self._forward_of(spec.method)(self.module, *args, **kwargs)
                stored = stored_tensors.take_appended(self.module, lengths)
            except Exception:
                stored_tensors.drop_appended(self.module, lengths)
                raise
            draws = default_env().param.prng is not key
            result, stored = jax_view(as_views((result, stored)))
            result = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else Constant(leaf), result)
        self._check_pure(spec.method, draws, inside, weights, state)
        return result, stored

    def _check_pure(
        self,
        method: str,
        draws: bool,
        inside: list[tuple[jax.Array, Any]],
        weights: Mapping[str, jax.Array],
        state: Mapping[str, Any],
    ) -> None:
        """Raises UnsupportedModelError for a method that has done more than compute its result.

        Args:
            method: Name of the method.
            draws: Whether it has drawn random numbers.
            inside: Tensors inside of arguments as they were, and their views.
            weights: Every tensor of the module as it was.
            state: Views of them.
        """
        name = type(self.module).__name__
        if draws:
            raise UnsupportedModelError(
                f"{name}.{method} draws random numbers, which a compiled program would repeat at every call; call it "
                "in PyTorch, before to_jax"
            )
        if any(jax_view(view) is not before for before, view in inside):
            raise UnsupportedModelError(
                f"{name}.{method} writes into a tensor inside of one of its arguments, such as a cache, which a "
                "compiled program cannot; leave this part in PyTorch"
            )
        if written := [each for each, tensor in state.items() if jax_view(tensor) is not weights[each]]:
            raise UnsupportedModelError(
                f"{name} writes into its own weights ({', '.join(written[:3])}) when called; a compiled program cannot"
            )


def _inside_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[jax.Array, Any]]:
    """Returns the arrays of views inside of arguments, such as those of a cache, with the views."""
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs))
    return [(jax_view(leaf), leaf) for path, leaf in leaves if len(path) > 2 and is_view(leaf)]


@contextlib.contextmanager
def restored_state(module: torch.nn.Module, kept: set[str], weights: Iterable[Any]) -> Iterator[None]:
    """Restores the attributes of `module` and its parts behind a trace.

    Video autoencoders store features of earlier frames in lists, and some transformers tables of rotations. The names
    of attributes that hold a traced tensor then, other than one of `weights`, are added to `kept`.
    """
    known = {id(weight) for weight in weights}
    before = [
        (path, vars(child), {k: _copied(v) for k, v in vars(child).items()}) for path, child in module.named_modules()
    ]
    try:
        yield
    finally:
        for path, attributes, values in before:
            for name, value in attributes.items():
                leaves = () if name in _OF_TORCH else jax.tree.leaves(value, is_leaf=is_view)
                if any(is_view(leaf) and id(leaf) not in known for leaf in leaves):
                    kept.add(f"{path}.{name}" if path else name)
            for name in attributes.keys() - values.keys():
                del attributes[name]
            for name, (value, content) in values.items():
                if type(value) is list:
                    value[:] = content
                elif type(value) is dict:
                    value.clear()
                    value.update(content)
                attributes[name] = value


def _copied(value: Any) -> tuple[Any, Any]:
    return value, (type(value)(value) if type(value) in (list, dict) else None)
