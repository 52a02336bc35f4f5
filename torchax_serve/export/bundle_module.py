"""`BundleModule`: a module of any library from a bundle, without torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

import jax
import numpy as np

from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.compilation.xla_cache import programs_dir
from torchax_serve.export.layout import MODULE
from torchax_serve.export.manifest import Manifest
from torchax_serve.export.programs import ExportedPrograms
from torchax_serve.export.values import described_values, restored_values
from torchax_serve.export.weights import read_weights

_BATCH = "batch"
_NARROWED = {"int64": "int32", "float64": "float32", "complex128": "complex64"}


class BundleModule:
    """A module without PyTorch: arrays of NumPy in and out.

    A context manager that frees the weights.
    Lengths of named dimensions are padded to the next one that was exported, and results are cut. Several threads may
    call it.

    Attributes:
        name: Name of the bundle.
        manifest: The manifest of the bundle.
        sizes: Lengths of each named dimension that have programs.
    """

    def __init__(self, manifest: Manifest, variant: Mapping[str, Any], name: str) -> None:
        self.name, self.manifest = name, manifest
        self._described: Mapping[str, Any] = manifest[MODULE]
        self.sizes: dict[str, list[int]] = self._described["sizes"]
        self._weights, names, self._content = read_weights(manifest)
        programs = ExportedPrograms(manifest, variant, names)
        executables = ExecutableCache(programs_dir(), programs.identity, exported=programs)
        self._forward: CachedFunction | None = CachedFunction(executables, MODULE, _not_traced)
        first = next(iter(variant["programs"].values()))
        self._dtypes = [each["dtype"] for each in first["arguments"]]
        self._shapes = [each["shape"] for each in first["arguments"]]
        kinds = inspect.Parameter
        self._signature = inspect.Signature(
            [
                kinds(each["name"], getattr(kinds, each["kind"]), default=None if each["is_optional"] else kinds.empty)
                for each in self._described["parameters"]
            ]
        )

    def __repr__(self) -> str:
        state = "closed" if self._forward is None else f"on {jax.devices()[0].device_kind}"
        return f"<BundleModule {self.name!r}: {self.manifest['model']['class']}, {state}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's forward returns for the same arguments, as arrays of NumPy.

        Raises:
            InvalidArgumentError: other arguments than those of the call that was exported, but for the values of
                arrays and the lengths of named dimensions.
        """
        if self._forward is None:
            raise TorchaxServeError("expected an open model, this one is closed; call serve() again")
        arrays = self._arrays(args, kwargs)
        lens = self._lens(arrays)
        padded = [
            to_device(_padded(array, dims, self._buckets(lens)), array.dtype)
            for array, dims in zip(arrays, self._described["dims"], strict=True)
        ]
        found = self._forward(self._weights, padded, spec=None)
        cut = [
            np.asarray(array)[tuple(slice(None if dim is None else lens[dim]) for dim in dims)]
            for array, dims in zip(found, self._described["result_dims"], strict=True)
        ]
        return restored_values(self._described["results"], cut)

    def _arrays(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[np.ndarray]:
        """Returns the arrays of a call, in the dtypes of the programs."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArgumentError(
                f"{self.name}: expected the arguments {self._signature}, got others ({error}); correct them"
            ) from None
        given, leaves = described_values(
            (bound.args, bound.kwargs), lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype"), self.name
        )
        if given != self._described["arguments"]:
            raise InvalidArgumentError(
                f"{self.name}: expected arguments like those of the export ({self._described['arguments']}), got "
                f"{given}; pass the same with arrays in the same places"
            )
        arrays = [np.asarray(leaf) for leaf in leaves]
        found = []
        for number, (array, dtype) in enumerate(zip(arrays, self._dtypes, strict=True)):
            if _NARROWED.get(str(array.dtype), str(array.dtype)) != dtype:
                raise InvalidArgumentError(
                    f"{self.name}, array {number}: expected {dtype}, got {array.dtype}; convert it"
                )
            found.append(array.astype(jax.numpy.dtype(dtype)))
        return found

    def _lens(self, arrays: Sequence[np.ndarray]) -> dict[str, int]:
        """Returns the length of each named dimension of a call."""
        lens: dict[str, int] = {}
        for number, (array, dims) in enumerate(zip(arrays, self._described["dims"], strict=True)):
            shape = self._shapes[number]
            is_other = len(shape) != array.ndim or any(
                dim is None and wanted != size for dim, wanted, size in zip(dims, shape, array.shape, strict=True)
            )
            if is_other:
                shown = [wanted if dim is None else dim for dim, wanted in zip(dims, shape, strict=True)]
                raise InvalidArgumentError(
                    f"{self.name}, array {number}: expected the shape {shown}, got {list(array.shape)}; correct it"
                )
            for dim, size in zip(dims, array.shape, strict=True):
                if dim is not None and lens.setdefault(dim, size) != size:
                    raise InvalidArgumentError(
                        f"{self.name}, array {number}: expected {lens[dim]} in the dimension {dim}, as of the array "
                        f"before, got {size}; correct it"
                    )
        return lens

    def _buckets(self, lens: Mapping[str, int]) -> dict[str, int]:
        """Returns the length that each dimension is padded to."""
        found = {}
        for dim, size in lens.items():
            fitting = [each for each in self.sizes[dim] if each >= size]
            if not fitting or size < 1:
                raise InvalidArgumentError(
                    f"{self.name}: expected 1 to {self.sizes[dim][-1]} in the dimension {dim}, as exported, got {size};"
                    " call it for parts, or export the module with larger sizes"
                )
            found[dim] = fitting[0]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights. Closing twice does nothing."""
        self._forward = None
        self._weights = {}


def _not_traced(weights: Any, arrays: Any, spec: Any) -> NoReturn:
    raise AssertionError("programs of a bundle were traced before")


def _padded(array: np.ndarray, dims: Sequence[str | None], buckets: Mapping[str, int]) -> np.ndarray:
    """Returns an array with zeros behind, and copies of the last row."""
    for axis, dim in enumerate(dims):
        if dim is not None and (missing := buckets[dim] - array.shape[axis]):
            widths = [(0, missing if each == axis else 0) for each in range(array.ndim)]
            array = np.pad(array, widths, mode="edge" if dim == _BATCH else "constant")
    return array
