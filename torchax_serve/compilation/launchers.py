"""Launches executables on a mesh, or on the devices of other hosts, too."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol

import jax

# CPU devices of one process share its threads: two programs that exchange, under way at once, can each hold threads
# that the exchange of the other waits for, and neither ends.
CPU_COLLECTIVE_LOCK = threading.Lock()


class CompilableFunction(Protocol):
    """A function of arrays that can be compiled for given arguments."""

    name: str
    facts: Callable[[], dict[str, Any]]

    def compile(
        self,
        weights: Any,
        args: tuple[Any, ...],
        spec: Any,
        *,
        name: str | None = None,
        adapt: Callable[[Any], Any] = lambda out: out,
    ) -> Any:
        """Compiles the function; `adapt` is applied to its result inside the program."""


class Launcher(Protocol):
    """Compiles and runs functions on devices that include those of other hosts."""

    def program(
        self, function: CompilableFunction, weights: Any, args: tuple[Any, ...], spec: Any, precision: Any
    ) -> Callable[..., Any]:
        """Compiles `function` on all hosts and returns what runs it on all of them."""

    def close(self) -> None:
        """Ends the run on all hosts."""


def on_mesh(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns `tree` with every array placed on all devices of `mesh`."""
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    devices = set(mesh.devices.flat)

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            is_there = leaf.sharding is not None and leaf.sharding.device_set == devices
            return leaf if is_there else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        return leaf if _is_on(leaf, devices) else jax.device_put(leaf, everywhere)

    return jax.tree.map(place, tree)


def _is_on(leaf: Any, devices: set[jax.Device]) -> bool:
    """Returns whether `leaf` is an array on exactly these devices."""
    return isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices


def _is_replicated(leaf: Any) -> bool:
    """Returns whether `leaf` is replicated on all of its devices."""
    return isinstance(leaf, jax.Array) and leaf.sharding.is_fully_replicated


@dataclasses.dataclass(frozen=True)
class MeshExecutable:
    """A program on many devices for a caller who knows of one.

    Arguments that lie elsewhere go to all devices. What all devices have alike comes out on the default device. What is
    divided, as most pools are, stays where it is, and so does the new value of what was donated on all devices, as
    pools of latents are: the next call would copy it to all of them again. XLA's aliases do not tell that value: JAX
    pairs a donated argument with the first result of its shape and dtype.

    Attributes:
        program: The compiled program.
        mesh: Its devices.
        donated: Positions of the donated arguments, of which the weights are number 0, each with the position of its
            new value in the result; None where that is all of the result.
    """

    program: Any
    mesh: jax.sharding.Mesh
    donated: tuple[tuple[int, int | None], ...] = ()

    def __call__(self, weights: Any, *args: Any) -> Any:
        """Runs the program; on CPU devices one after the other, whoever calls."""
        if self.mesh.devices.flat[0].platform != "cpu":
            return self._placed(self.program(weights, *on_mesh(args, self.mesh)), args)
        with CPU_COLLECTIVE_LOCK:
            out = self.program(weights, *jax.block_until_ready(on_mesh(args, self.mesh)))
            return jax.block_until_ready(self._placed(out, args))

    def _placed(self, out: Any, args: tuple[Any, ...]) -> Any:
        """Returns results where the caller of `args` expects them."""
        devices = set(self.mesh.devices.flat)
        kept: set[int] = set()  # by id
        for position, result in self.donated:
            before, after = jax.tree.leaves(args[position - 1]), jax.tree.leaves(out if result is None else out[result])
            if len(before) == len(after):  # else a first value was made, of nothing
                pairs = zip(before, after, strict=True)
                kept |= {id(new) for old, new in pairs if _is_replicated(old) and _is_on(old, devices)}

        def placed(array: jax.Array) -> jax.Array:
            if not _is_replicated(array) or id(array) in kept:
                return array
            return jax.device_put(array.addressable_data(0), jax.local_devices()[0])  # where callers have the rest

        return jax.tree.map(placed, out)

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results."""
        return self.program.out_info

    def memory_analysis(self) -> Any:
        """Returns XLA's memory analysis of the program, for one device."""
        return self.program.memory_analysis()

    def as_text(self) -> str:
        """Returns the compiled program in XLA's language (HLO)."""
        text: str = self.program.as_text()
        return text
