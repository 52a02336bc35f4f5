"""Programs of a module in a bundle: one for each combination of its dimensions' lengths."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from model_adapters.errors import InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from model_adapters.program.module_program import Constant
from torchax_serve.export.layout import MODULE
from torchax_serve.export.program_writer import ProgramWriter
from torchax_serve.export.programs import program_key
from torchax_serve.export.targets import ExportTarget
from torchax_serve.export.values import described_values
from torchax_serve.modules.named_dims import BATCH, MAX_ROWS, NamedCall
from torchax_serve.modules.runtime import ModuleRuntime


@dataclasses.dataclass(frozen=True)
class ModuleExporter:
    """Writes the programs of one module.

    Attributes:
        runtime: Runs the module.
        name: What it is called.
        signature: Of its forward.
        call: A call, whose values count for nothing but those that are no tensors.
        sizes: Lengths of each named dimension that have programs, in rising order.
    """

    runtime: ModuleRuntime
    name: str
    signature: inspect.Signature
    call: NamedCall
    sizes: Mapping[str, Sequence[int]]

    @classmethod
    def of(
        cls,
        runtime: ModuleRuntime,
        name: str,
        signature: inspect.Signature,
        call: NamedCall,
        sizes: Mapping[str, Sequence[int]],
    ) -> ModuleExporter:
        """Returns an exporter, with powers of two for rows that have no sizes.

        Raises:
            InvalidArgumentError: a dimension without sizes, sizes of no dimension, or other than lengths.
        """
        if BATCH in call.lens and call.num_rows is None:
            raise InvalidArgumentError(
                f"{name}: expected a dimension batch of every tensor for a bundle, got some without; leave the name out"
            )
        if unknown := sorted(set(sizes) - set(call.lens)):
            raise InvalidArgumentError(
                f"sizes: expected names of dimensions ({', '.join(call.lens) or 'there are none'}), got {unknown[0]!r}"
            )
        rows = tuple(1 << power for power in range(MAX_ROWS.bit_length()))
        known = ({BATCH: rows} if BATCH in call.lens else {}) | dict(sizes)
        if missing := [each for each in call.lens if each not in known]:
            raise InvalidArgumentError(
                f"sizes: expected the lengths of {missing[0]!r} that have programs, such as {{{missing[0]!r}: (16, "
                "64)}, got none; pass them"
            )
        for each, lens in known.items():
            if not lens or any(type(length) is not int or length < 1 for length in lens):
                raise InvalidArgumentError(f"sizes[{each!r}]: expected lengths from 1, got {lens!r}; correct them")
        return cls(runtime, name, signature, call, {each: sorted(set(lens)) for each, lens in known.items()})

    def described(self) -> dict[str, Any]:
        """Returns what the manifest says about the forward.

        Raises:
            UnsupportedModelError: results whose lengths are neither fixed nor those of named dimensions.
        """
        arguments, _ = self._arguments(self.call)
        results, axes = self._results()
        parameters = [
            {"name": each.name, "kind": each.kind.name, "is_optional": each.default is not each.empty}
            for each in self.signature.parameters.values()
        ]
        return {
            "parameters": parameters,
            "arguments": arguments,
            "dims": [list(dims) for dims in self.call.dims],
            "sizes": {name: list(lens) for name, lens in self.sizes.items()},
            "results": results,
            "result_dims": axes,
        }

    def export(self, target: ExportTarget, programs: ProgramWriter) -> dict[str, Any]:
        """Writes the programs for a platform; returns their part of the manifest.

        Raises:
            UnsupportedModelError: code that reads the values of tensors.
        """
        written = {}
        with target.tracing(None) as sharding:
            for lens in self._combinations():
                function, arrays = self._traced(lens)
                names = [f"array {number}" for number in range(len(arrays))]
                key = program_key(MODULE, (arrays,), None)
                try:
                    written[key] = programs.write(function, MODULE, key, (arrays,), names, target, sharding)
                except TorchaxServeError:
                    raise
                except Exception as error:  # whatever model code raises for want of values
                    raise self._reads_values(error) from error
        return {
            "platform": target.platform,
            "chip": target.chip,
            "uses_kernels": target.uses_kernels,
            "programs": written,
        }

    def _combinations(self) -> Iterator[dict[str, int]]:
        for lens in itertools.product(*self.sizes.values()):
            yield dict(zip(self.sizes, lens, strict=True))

    def _arguments(self, call: NamedCall) -> tuple[Any, list[Any]]:
        return described_values(call.arguments(), lambda leaf: hasattr(leaf, "new_zeros"), f"{self.name}, arguments")

    def _traced(self, lens: Mapping[str, int]) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """Returns the function of weights and arrays for these lengths, and its arrays."""
        own, arrays = self.runtime.function_of("forward", *self.call.of_lens(lens).arguments())

        def function(weights: Any, arrays: list[jax.Array]) -> tuple[Any, ...]:
            return tuple(self._described(own(weights, arrays))[1])

        return function, [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]

    def _described(self, result: Any) -> tuple[Any, list[Any]]:
        plain = jax.tree.map(
            lambda leaf: leaf.value if isinstance(leaf, Constant) else leaf,
            result,
            is_leaf=lambda leaf: isinstance(leaf, Constant),
        )
        return described_values(plain, lambda leaf: hasattr(leaf, "dtype"), f"{self.name}, results")

    def _shapes(self, lens: Mapping[str, int]) -> tuple[Any, list[tuple[int, ...]]]:
        own, arrays = self.runtime.function_of("forward", *self.call.of_lens(lens).arguments())
        try:
            found, leaves = self._described(jax.eval_shape(own, self.runtime.weights, arrays))
        except TorchaxServeError:
            raise
        except Exception as error:
            raise self._reads_values(error) from error
        return found, [tuple(leaf.shape) for leaf in leaves]

    def _results(self) -> tuple[Any, list[list[str | None]]]:
        """Returns the structure of the results, and the name of each of their dimensions."""
        largest = {name: lens[-1] for name, lens in self.sizes.items()}
        found, shapes = self._shapes(largest)
        axes: list[list[str | None]] = [[None] * len(shape) for shape in shapes]
        for name, size in largest.items():
            probed = sorted({1, (size + 1) // 2, size - 1 or 2} - {size})
            others = [self._shapes({**largest, name: length}) for length in probed]
            for number, shape in enumerate(shapes):
                if any(each != found or len(own[number]) != len(shape) for each, own in others):
                    raise self._other_results(name)
                for axis, length in enumerate(shape):
                    lens = [own[number][axis] for _, own in others]
                    if [length, *lens] == [size, *probed] and axes[number][axis] is None:
                        axes[number][axis] = name
                    elif any(each != length for each in lens):
                        raise self._other_results(name)
        for given in self._combinations():
            wanted = [
                tuple(size if name is None else given[name] for name, size in zip(names, shape, strict=True))
                for names, shape in zip(axes, shapes, strict=True)
            ]
            if self._shapes(given) != (found, wanted):
                raise self._other_results(next(iter(given), BATCH))
        if BATCH in largest and any(names[:1] != [BATCH] for names in axes):
            raise self._other_results(BATCH)
        return found, axes

    def _other_results(self, name: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.name}: expected results whose lengths are fixed or those of {name}, rows first, got others; leave "
            f"{name} out of dims, and export a bundle for each length"
        )

    def _reads_values(self, error: Exception) -> UnsupportedModelError:
        lines = str(error).strip().splitlines() or [""]
        return UnsupportedModelError(
            f"export: expected a module whose code does not read the values of tensors, got {self.name} "
            f"({type(error).__name__}: {lines[0][:200]}); leave this part in PyTorch"
        )
