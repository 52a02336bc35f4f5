"""`ModuleModel`: a module of any library that many callers share."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import jax
import torch
from jax.sharding import Mesh, NamedSharding

from model_adapters.errors import InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from model_adapters.ops.compressed_weight import Weight
from torchax_serve.distributed.mesh import mesh_for
from torchax_serve.modules.named_dims import BATCH, MAX_ROWS, NamedCall, dims_of_forward, joined
from torchax_serve.modules.plan import ModulePlan, plan_of
from torchax_serve.modules.runtime import ModuleRuntime
from torchax_serve.modules.to_jax import module_to_jax
from torchax_serve.pooling.queue import PoolingQueue, QueuedTexts, check_wanted

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-3}
"""Largest difference that padding may make, relative to the largest number of a result where that is above 1."""


class ModuleModel:
    """A module of any library on JAX, called by several threads at once; made by `serve`.

    Calls wait in a queue. Dimensions of its arguments may have names. Rows of calls that wait together become one
    batch, where every tensor has a dimension "batch"; dimensions of another name, such as "time", are padded with
    zeros to a power of two, so that few programs are compiled, and results are cut. That padding changes no result is
    checked the first time it is done. A context manager: leaving it frees the weights.

    Args:
        module: The module; it runs on JAX from then on, and is set to evaluation.
        dims: Names of the dimensions by argument, such as ``{"x": ("batch", "time", None)}``; None: those in the
            annotations of its forward, ``x: Annotated[torch.Tensor, "batch", "time", None]``, or none.
        name: What it is called in messages; None: its class.
        quantization: Preset, file or list of rules, as for `torchax_serve.serve`; weights of linear layers are stored
            quantized.
        mesh, tensor_parallel: Devices on the axes ``model``, which divide the weights, and ``data``, which divide rows.
        weights: Arrays and quantized weights by name, in place of the module's own values; None: those.

    Attributes:
        name: As above.
        dims: Names of dimensions by argument.

    Raises:
        InvalidArgumentError: names of arguments that the forward does not have; as `torchax_serve.to_jax`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        dims: Mapping[str, Sequence[str | None]] | None = None,
        name: str | None = None,
        quantization: Any = None,
        mesh: Mesh | Mapping[str, int] | None = None,
        tensor_parallel: int | None = None,
        weights: Mapping[str, Weight] | None = None,
    ) -> None:
        self.name = name or type(module).__name__
        forward = type(module).forward
        self.dims = dims_of_forward(forward, dims)
        self._signature = inspect.signature(forward.__get__(module))
        runtime = None if weights is None else ModuleRuntime(module, weights, is_diffusers=False)
        self._module: torch.nn.Module | None = module_to_jax(
            module, runtime, quantization=quantization, mesh=mesh_for(mesh, tensor_parallel)
        )
        self._queue = PoolingQueue()
        self._checked: set[Any] = set()

    def __repr__(self) -> str:
        state = "closed" if self._module is None else f"on {jax.devices()[0].device_kind}"
        return f"<ModuleModel {self.name!r}: {state}>"

    @property
    def torch_model(self) -> torch.nn.Module:
        """The module, whose forward runs on JAX."""
        if self._module is None:
            raise TorchaxServeError("expected an open model, this one is closed; call serve() again")
        return self._module

    @property
    def _runtime(self) -> ModuleRuntime:
        found: ModuleRuntime = vars(self.torch_model)["_jax_runtime"]
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's forward returns for the same arguments; see `run`."""
        return self.run(args, kwargs)

    def run(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Any:
        """Returns the forward's result, tensors on the host.

        Args:
            args: Positional arguments of the forward.
            kwargs: Its keyword arguments.
            timeout_s: Seconds after which the call ends with an error, looked at before the forward; None: never.
            queue_timeout_s: The same for a call that has not begun by then.

        Raises:
            InvalidArgumentError: other arguments than those of the forward, or other dimensions than their names.
            UnsupportedModelError: code that cannot be compiled; padding or other rows change a result.
            QueueFullError: too many calls are waiting.
            DeadlineError: a time limit has passed.
        """
        (found,) = self._queued(args, kwargs or {}).run(timeout_s, queue_timeout_s)
        return found

    async def arun(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Any:
        """Works as `run` without blocking the event loop; cancelling ends it before its forward."""
        (found,) = await self._queued(args, kwargs or {}).run_async(timeout_s, queue_timeout_s)
        return found

    def export(
        self,
        out: str | os.PathLike[str],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        sizes: Mapping[str, Sequence[int]] | None = None,
        platforms: Sequence[str] = ("cpu",),
        weights: Literal["safetensors", "orbax"] = "safetensors",
        native: bool = True,
        reference: bool = True,
        advance: Callable[[int], object] = lambda number: None,
    ) -> Path:
        """Writes weights and programs as a bundle that runs without torch.

        Returns the version's folder. ``serve(out)`` takes arrays of NumPy. That padding changes no result is checked
        first.

        Args:
            out: folder of the bundle, new or with other versions.
            args: positional arguments of a call like those that the bundle will get.
            kwargs: its keyword arguments.
            sizes: lengths of each named dimension that have programs, such as ``{"time": (16, 64)}``; those of
                "batch" are the powers of two up to 32 where it has none.
            platforms: platforms of the programs: ``cpu``, ``tpu:v6e``, ``cuda:h100``; their devices need not be here.
            weights: format of the weights; safetensors are mapped.
            native, reference, advance: as of `torchax_serve.ServedModel.export`.

        Raises:
            UnsupportedModelError: code that reads values of tensors; padding changes results; results of other
                lengths than those of named dimensions; a module on a mesh.
            InvalidArgumentError: sizes that do not fit; a folder with something else in it.
            TorchaxServeError: the disk is full, or a package is missing.
        """
        from torchax_serve.export.modules import ModuleExporter
        from torchax_serve.export.writer import ExportRequest, export_module

        self._check_one_device("export")
        call = self._call(args, kwargs or {})
        exporter = ModuleExporter.of(self._runtime, self.name, self._signature, call, sizes or {})
        if call.lens:
            self.run(*call.not_of_buckets().arguments())
        request = ExportRequest(
            platforms=platforms, weights=weights, native=native, reference=reference, advance=advance
        )
        return export_module(exporter, Path(out), request).folder

    def plan(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> ModulePlan:
        """Returns bytes and arithmetic of the program of a call, which is compiled and not run.

        Raises:
            UnsupportedModelError: code that reads values of tensors; a module on a mesh.
        """
        self._check_one_device("plan")
        call = self._call(args, kwargs or {}).padded()
        return plan_of(self._runtime, (call if call.num_rows is None else joined([call])).arguments())

    def _check_one_device(self, what: str) -> None:
        """Raises UnsupportedModelError on a mesh."""
        if any(isinstance(each.sharding, NamedSharding) for each in jax.tree.leaves(self._runtime.weights)):
            raise UnsupportedModelError(
                f"{what}: expected a module on one device, got {self.name} on a mesh; serve it without"
            )

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NamedCall:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArgumentError(
                f"{self.name}: expected the arguments {self._signature}, got others ({error}); correct them"
            ) from None
        return NamedCall.of(bound, self.dims)

    def _queued(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> QueuedTexts:
        call = self._call(args, kwargs)
        key = call.key()
        try:
            hash(key)
        except TypeError:  # a value that the runtime refuses by name
            key = object()
        return QueuedTexts(self._queue, key, self._results, [call])

    def _results(self, calls: Sequence[NamedCall]) -> list[Any]:
        """Returns the result of each call, those with few rows in batches."""
        found: list[Any] = []
        waiting: list[NamedCall] = []
        for call in calls:
            num_rows = sum(each.num_rows or 0 for each in waiting)
            if waiting and (call.num_rows is None or num_rows + call.num_rows > MAX_ROWS):
                found += self._batch(waiting)
                waiting = []
            waiting.append(call)
        return found + self._batch(waiting)

    def _batch(self, calls: Sequence[NamedCall]) -> list[Any]:
        check_wanted()
        padded = [call.padded() for call in calls]
        if calls[0].num_rows is None:
            found = self._forward(padded[0])
            if padded[0].lens == calls[0].lens:
                return [found]
            cut = _cut(found, self._shapes_of(calls[0]), None)
            self._check(calls[0], padded[0], cut)
            return [cut]
        batch = joined(padded)
        output, begin, found = self._forward(batch), 0, []
        for call in calls:
            end = begin + (call.num_rows or 0)
            found.append(_cut(output, self._shapes_of(call), (begin, end, batch.lens[BATCH])))
            begin = end
        self._check(calls[0], batch, found[0])
        return found

    def _forward(self, call: NamedCall) -> Any:
        args, kwargs = call.arguments()
        return self.torch_model(*args, **kwargs)

    def _shapes_of(self, call: NamedCall) -> list[tuple[int, ...]]:
        """Returns the shapes of the results of a call that is not padded."""
        return self._runtime.shapes_of("forward", *call.arguments())

    def _check(self, call: NamedCall, padded: NamedCall, cut: Any) -> None:
        """Compares the first padded result of a kind, which is cut, with the same call by itself.

        Raises:
            UnsupportedModelError: they differ.
        """
        names = sorted(name for name, size in call.lens.items() if padded.lens[name] != size)
        kind = (self._runtime.num_changes, tuple(names), call.others[0])
        if not names or kind in self._checked:
            return
        for ours, exact in zip(jax.tree.leaves(cut), jax.tree.leaves(self._forward(call)), strict=True):
            if not isinstance(exact, torch.Tensor):
                continue
            limit = TOLERANCES.get(exact.dtype, 0.0) * max(1.0, float(exact.abs().max()) if exact.numel() else 1.0)
            if ours.shape != exact.shape or (exact.numel() and float((ours - exact).abs().max()) > limit):
                raise UnsupportedModelError(
                    f"{self.name}: expected results that do not depend on zeros behind {' and '.join(names)} or on "
                    "other rows, got others; leave these names out of dims, or let the forward take a mask"
                )
        self._checked.add(kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the queue and frees the weights. Closing twice does nothing."""
        self._queue.close("by its caller")
        self._module = None


def _cut(output: Any, shapes: Sequence[tuple[int, ...]], rows: tuple[int, int, int] | None) -> Any:
    """Returns a result without padding.

    Args:
        output: Of a padded batch.
        shapes: Of the tensors of the result.
        rows: First row, end, and number of rows of the batch; None if it has no rows.

    Raises:
        UnsupportedModelError: a result without a first dimension for the rows.
    """
    leaves, tree = jax.tree.flatten(output)
    wanted, found = iter(shapes), []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            found.append(leaf)
            continue
        shape = next(wanted)
        if rows is None:
            found.append(leaf[tuple(slice(size) for size in shape)])
            continue
        begin, end, number = rows
        if not shape or leaf.shape[0] != number or shape[0] != end - begin:
            raise UnsupportedModelError(
                f"expected results whose first dimension is that of the rows, got the shape {tuple(leaf.shape)} for "
                f"{number} rows; leave 'batch' out of dims"
            )
        found.append(leaf[(slice(begin, end), *(slice(size) for size in shape[1:]))])
    return jax.tree.unflatten(tree, found)
