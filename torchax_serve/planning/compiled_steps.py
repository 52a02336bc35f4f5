"""Traces of the engine's steps on abstract arrays, compiled for absent devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.errors import OutOfMemoryError
from torchax_serve.executors.base import AbstractStep
from torchax_serve.planning.abstract_model import AbstractModel
from torchax_serve.planning.chips import Chip
from torchax_serve.planning.topology import compiling_for, lowering_platform

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_DTYPE_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8}
_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(-start)?\(")
_RESULT = re.compile(r"\s*(?:ROOT )?%?\S+ = (.*)")  # an instruction up to its name


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """Compiler's report about one step on one device.

    Attributes:
        name: ``decode`` or ``prefill``.
        num_tokens: Number of tokens computed in the step.
        num_rows: Number of requests in the step.
        argument_bytes: Bytes of weights, cache and inputs.
        temporary_bytes: Bytes of temporaries while the step runs.
        alias_bytes: Bytes of results written over donated arguments: the cache.
        code_bytes: Bytes of the program.
        collectives: Number of collectives and bytes of their results, by kind.
        flops, bytes_accessed: Operations and bytes of the step as counted by the compiler; None if it does not count.
        compiler_s: Compiler's estimate in seconds, without exchange between devices; None if it has none.
        num_opaque: Number of calls whose time is not in the estimate, such as kernels.
        trace_s, compile_s: Seconds of tracing and compiling.
    """

    name: str
    num_tokens: int
    num_rows: int
    argument_bytes: int
    temporary_bytes: int
    alias_bytes: int
    code_bytes: int
    collectives: Mapping[str, tuple[int, int]]
    flops: float | None
    bytes_accessed: float | None
    compiler_s: float | None
    num_opaque: int
    trace_s: float
    compile_s: float


def compile_step(step: AbstractStep, model: AbstractModel, chip: Chip) -> tuple[ProgramReport, Any]:
    """Compiles `step` of `model` for `chip`; returns the report and the program.

    Raises:
        OutOfMemoryError: The step does not fit into the device's memory.
    """
    names = {id(array): name for name, array in reversed(list(model.weights.items()))}
    owners = {name: names[id(array)] for name, array in model.weights.items()}
    unique = {name: array for name, array in model.weights.items() if owners[name] == name}

    def run(weights: dict[str, jax.Array], *args: Any) -> Any:
        logits, *cache = step.function({name: weights[owner] for name, owner in owners.items()}, *args)
        return jnp.argmax(logits.astype(jnp.float32), -1).astype(jnp.int32), *cache

    run.__name__ = step.name
    donated = tuple(1 + number for number in step.donated)
    # Told of the mesh, JAX lays results as what is donated for them. Code without a cache may read what it computes of
    # known values, and these would then be looked for on the mesh.
    of_mesh = jax.set_mesh(model.sharding.mesh) if donated else contextlib.nullcontext()
    with of_mesh, compiling_for(chip):
        report, compiled = compile_traced(run, (unique, *step.args), lowering_platform(chip), donated=donated)
    return dataclasses.replace(report, num_tokens=step.num_tokens, num_rows=step.num_rows), compiled


def compile_traced(
    function: Callable[..., Any], args: tuple[Any, ...], platform: str, *, donated: tuple[int, ...] = ()
) -> tuple[ProgramReport, Any]:
    """Traces and compiles `function` for the devices of abstract `args`.

    Returns the report and the program.

    Args:
        function: Function whose name is that of the program.
        args: Abstract arrays with shardings.
        platform: JAX's name of the devices' platform.
        donated: Numbers of the donated arguments.

    Raises:
        OutOfMemoryError: The program does not fit into the device's memory.
    """
    start = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=donated).trace(*args).lower(lowering_platforms=(platform,))
    lowered_at = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(_used_of(str(error))) from error
    end = time.perf_counter()
    return _report(function.__name__, compiled, lowered_at - start, end - lowered_at), compiled


def _used_of(message: str) -> str:
    """Extracts the compiler's line about the memory that it needs."""
    found = re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm", message)
    if found:
        return f"the compiler needs {found[1]}iB of the {found[2]}iB that a device has"
    return message.strip().splitlines()[0][:200]


def _report(name: str, compiled: Any, trace_s: float, compile_s: float) -> ProgramReport:
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    text = compiled.as_text()
    compiler_s, num_opaque = estimate(cost.get("optimal_seconds"))
    return ProgramReport(
        name=name,
        num_tokens=0,
        num_rows=0,
        argument_bytes=int(memory.argument_size_in_bytes),
        temporary_bytes=int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes),
        alias_bytes=int(memory.alias_size_in_bytes),
        code_bytes=int(memory.generated_code_size_in_bytes),
        collectives=count_collectives(text),
        flops=cost.get("flops"),
        bytes_accessed=cost.get("bytes accessed"),
        compiler_s=compiler_s,
        num_opaque=num_opaque,
        trace_s=trace_s,
        compile_s=compile_s,
    )


def estimate(seconds: float | None) -> tuple[float | None, int]:
    """Returns the time of known operations and the number of unknown calls.

    Both come from the compiler's sum of seconds. XLA's `HloCostAnalysis` adds up the least time of each operation, and
    -1 for each unknown one. So the time of the known operations can be recovered if it is less than a second.

    Args:
        seconds: Sum of the compiler; None if it has none.
    """
    if seconds is None or seconds == 0:
        return None, 0
    num_opaque = math.ceil(-seconds) if seconds < 0 else 0
    return seconds + num_opaque, num_opaque


def count_collectives(text: str) -> dict[str, tuple[int, int]]:
    """Returns, for each kind of collective, its number and the bytes of the results.

    The bytes are those on one device of a compiled program.

    Args:
        text: Program in XLA's language (HLO). A pair of ``-start`` and ``-done`` counts once.
    """
    counts = {kind: [0, 0] for kind in COLLECTIVES}
    for match in _COLLECTIVE.finditer(text):  # few among a hundred thousand lines: these are looked at, no others
        before = _RESULT.fullmatch(text, text.rfind("\n", 0, match.start()) + 1, match.start())
        if before is None:
            continue
        kind, arrays = match[1], _sizes_in(before[1])
        if match[2] and kind != "all-reduce" and len(arrays) > 1:
            arrays = arrays[len(arrays) // 2 :]  # operands stand before results
        counts[kind][0] += 1
        counts[kind][1] += sum(arrays)
    return {kind: (number, total) for kind, (number, total) in counts.items() if number}


def _sizes_in(types: str) -> list[int]:
    sizes = []
    for name, shape in re.findall(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]", types):
        bits = re.search(r"\d+", name)
        size = _DTYPE_BYTES.get(name, int(bits[0]) // 8 if bits else 0)
        for length in filter(None, shape.split(",")):
            size *= int(length)
        sizes.append(size)
    return sizes
