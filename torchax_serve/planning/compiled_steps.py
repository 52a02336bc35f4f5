"""The engine's steps, traced on abstract arrays and compiled for devices that need not be there."""

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
from torchax_serve.planning.abstract_model import AbstractModel
from torchax_serve.planning.chips import Chip
from torchax_serve.planning.topology import compiling_for, lowering_platform

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_DTYPE_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8}
_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(-start)?\(")
_RESULT = re.compile(r"\s*(?:ROOT )?%?\S+ = (.*)")  # an instruction up to its name


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """What the compiler says of one step on one device.

    Attributes:
        name: ``decode`` or ``prefill``.
        num_tokens: computed in the step.
        num_rows: requests in it.
        argument_bytes: weights, cache and inputs.
        temporary_bytes: beside them, while the step runs.
        alias_bytes: of the results, written over arguments: the cache.
        code_bytes: of the program.
        collectives: number and bytes of results, by kind.
        flops, bytes_accessed: in the step, as the compiler counts; None where it does not.
        compiler_s: the compiler's own estimate, exchange between devices not in it; None where it has none.
        num_opaque: calls that it knows nothing of, kernels above all, whose time is not in its estimate.
        trace_s, compile_s: what it took here.
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


@dataclasses.dataclass(frozen=True)
class Step:
    """One step to compile.

    Attributes:
        name: ``decode`` or ``prefill``.
        num_tokens: computed in it.
        num_rows: requests in it.
        context_len: tokens of each request, those of the step included.
        num_prompts: whose tokens it computes; 0 where each row has one token more.
        function: ``f(weights, *args)``, traced; its first result is logits.
        args: shapes.
        donated: which of `args` are given away and come back.
    """

    name: str
    num_tokens: int
    num_rows: int
    context_len: int
    num_prompts: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]


def compile_step(step: Step, model: AbstractModel, chip: Chip) -> tuple[ProgramReport, Any]:
    """Compiles `step` of `model` for `chip`; the report, and the program.

    Raises:
        OutOfMemoryError: the compiler finds no room on the device.
    """
    names = {id(array): name for name, array in reversed(list(model.weights.items()))}
    owners = {name: names[id(array)] for name, array in model.weights.items()}
    unique = {name: array for name, array in model.weights.items() if owners[name] == name}

    def run(weights: dict[str, jax.Array], *args: Any) -> Any:
        logits, *kept = step.function({name: weights[owner] for name, owner in owners.items()}, *args)
        return jnp.argmax(logits.astype(jnp.float32), -1).astype(jnp.int32), *kept

    run.__name__ = step.name
    donated = tuple(1 + number for number in step.donated)
    # Told of the mesh, JAX lays results as what is donated for them. Code without a cache may read what it computes of
    # known values, and these would then be looked for on the mesh.
    of_mesh = jax.set_mesh(model.sharding.mesh) if donated else contextlib.nullcontext()
    with of_mesh, compiling_for(chip):
        start = time.perf_counter()
        traced = jax.jit(run, donate_argnums=donated).trace(unique, *step.args)
        lowered = traced.lower(lowering_platforms=(lowering_platform(chip),))
        lowered_at = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemoryError(_used_of(str(error))) from error
        end = time.perf_counter()
    return _report(step, compiled, lowered_at - start, end - lowered_at), compiled


def _used_of(message: str) -> str:
    """What the compiler says about the memory it wanted, in a line."""
    found = re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm", message)
    if found:
        return f"the compiler needs {found[1]}iB of the {found[2]}iB that a device has"
    return message.strip().splitlines()[0][:200]


def _report(step: Step, compiled: Any, trace_s: float, compile_s: float) -> ProgramReport:
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    text = compiled.as_text()
    compiler_s, num_opaque = estimate(cost.get("optimal_seconds"))
    return ProgramReport(
        name=step.name,
        num_tokens=step.num_tokens,
        num_rows=step.num_rows,
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
    """What the compiler's sum of seconds means: the time of what it knows, and the number of calls it does not.

    XLA's `HloCostAnalysis` adds up what each operation takes at the least, and -1 for each it knows nothing of. So the
    time of what it knows can be told as long as it is less than a second.

    Args:
        seconds: the sum; None where the compiler has none.
    """
    if seconds is None or seconds == 0:
        return None, 0
    num_opaque = math.ceil(-seconds) if seconds < 0 else 0
    return seconds + num_opaque, num_opaque


def count_collectives(text: str) -> dict[str, tuple[int, int]]:
    """How many collectives of each kind a compiled program has, and the bytes of their results on one device.

    Args:
        text: the program in XLA's language. What begins with ``-start`` and ends with ``-done`` counts once.
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
