"""Leader: all hosts run each of its programs on the mesh, in one order.

Programs of many controllers are launched by each of them (Barham et al. 2022 call it multi-controller; so does JAX).
The leader's programs follow from requests that only it has, so it sends for each program its number and its
arguments. Arrays that a program has left on all hosts, such as pages, are named by number; the integers of a step
are sent.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from model_adapters.errors import HostsError, UnsupportedArgumentError
from model_adapters.ops import registry
from model_adapters.ops.compressed_weight import Weights
from torchax_serve.compilation.launchers import CPU_COLLECTIVE_LOCK, CompilableFunction
from torchax_serve.distributed.hosts.heartbeat import Heartbeat, wait_for_host_error
from torchax_serve.distributed.hosts.messages import ArrayRef, ArraySpec, Compile, End, Run, everywhere, spread


def compile_for_hosts(
    function: CompilableFunction, mesh: Mesh, weights: Weights, args: tuple[Any, ...], spec: Any
) -> Any:
    """Compiles a function for the devices of all hosts.

    Hosts read its first result, which is replicated on every device; the others are arguments of later programs.
    """

    def adapt(out: tuple[Any, ...]) -> tuple[Any, ...]:
        read, *rest = out
        return (jax.lax.with_sharding_constraint(read, everywhere(mesh)) if read is not None else None, *rest)

    return function.compile(weights, args, spec, adapt=adapt)


def launch_in_order(mesh: Mesh, program: Any, *args: Any) -> Any:
    """Launches a program; on CPU devices each program ends before the next begins.

    See `mesh_programs`.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return program(*args)
    with CPU_COLLECTIVE_LOCK:
        return jax.block_until_ready(program(*jax.block_until_ready(args)))


@dataclasses.dataclass(frozen=True)
class _RemoteArray:
    """Leader's reference to an array that all hosts have."""

    number: int
    array: weakref.ref[jax.Array] | jax.Array  # on the mesh; the caller's own where it is divided


class Leader:
    """Leader's side of the channel: sends programs to the followers.

    Args:
        mesh: Mesh of all hosts' devices.
        followers: Connections to the followers.
    """

    def __init__(self, mesh: Mesh, followers: Sequence[Heartbeat]) -> None:
        self._mesh, self._followers = mesh, list(followers)
        self._order = threading.RLock()  # all hosts run programs in the order in which it is taken
        self._known: dict[int, _RemoteArray] = {}  # by id of the array that the caller has
        self._dropped: collections.deque[int] = collections.deque()
        self._num_programs = self._num_results = 0
        self._is_over = False
        atexit.register(self.close)

    def program(
        self, function: CompilableFunction, weights: Weights, args: tuple[Any, ...], spec: Any, precision: Any
    ) -> MultiHostExecutable:
        """Compiles a function for these arguments on all hosts at the same time."""
        if registry.is_overridden():
            raise UnsupportedArgumentError("ops.use: expected on one host only, got a model on several; leave it out")
        with self._order, self._prefer_host_errors():
            number, self._num_programs = self._num_programs, self._num_programs + 1
            leaves, tree = jax.tree.flatten(args)
            sent = [self._encode(leaf) for leaf in leaves]
            kinds = [each if isinstance(each, ArrayRef) else ArraySpec(each.shape, each.dtype) for each in sent]
            described = jax.tree.unflatten(tree, kinds)
            self._send(Compile(number, function.name, spec, precision, bool(weights), described, function.facts()))
            error, program = None, None
            try:
                here = [
                    self._local_array(leaf) if isinstance(kind, ArrayRef) else kind.abstract(self._mesh)
                    for leaf, kind in zip(leaves, kinds, strict=True)
                ]
                program = compile_for_hosts(function, self._mesh, weights, tuple(jax.tree.unflatten(tree, here)), spec)
            except Exception as caught:
                error = caught
            for follower in self._followers:
                said = follower.incoming.get()
                assert said["compiled"] == number
                if error is None and "error" in said:
                    error = HostsError(f"{follower.who} cannot compile {function.name}: {said['error']}")
            if error is not None:
                raise error
            return MultiHostExecutable(self, number, program)

    def run(self, number: int, program: Any, weights: Weights, args: tuple[Any, ...]) -> Any:
        """Runs a compiled program on all hosts.

        Replicated results are returned on the leader's first device.
        """
        with self._order, self._prefer_host_errors():
            leaves, tree = jax.tree.flatten(args)
            sent = [self._encode(leaf) for leaf in leaves]
            first = self._num_results
            self._send(Run(number, tuple(sent), first, self._take_dropped()))
            here = [
                self._local_array(leaf) if isinstance(each, ArrayRef) else spread(each, self._mesh)
                for leaf, each in zip(leaves, sent, strict=True)
            ]
            out, tree = jax.tree.flatten(launch_in_order(self._mesh, program, weights, *jax.tree.unflatten(tree, here)))
            self._num_results += len(out)
            return jax.tree.unflatten(tree, [self._result(array, first + i) for i, array in enumerate(out)])

    @contextlib.contextmanager
    def _prefer_host_errors(self) -> Iterator[None]:
        """Reports the loss of a host instead of the error of a program that it has caused."""
        if self._is_over:
            raise HostsError("expected an open model, this one is closed; start all hosts again")
        try:
            yield
        except (OSError, jax.errors.JaxRuntimeError):
            wait_for_host_error()
            raise

    def _send(self, order: Any) -> None:
        for follower in self._followers:
            follower.wire.send_command(order)

    def _take_dropped(self) -> tuple[int, ...]:
        return tuple(self._dropped.popleft() for _ in range(len(self._dropped)))

    def _encode(self, leaf: Any) -> ArrayRef | np.ndarray:
        """Returns the message form of an argument."""
        known = self._known.get(id(leaf))
        if known is not None and not self._on_mesh(known).is_deleted():
            return ArrayRef(known.number)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise UnsupportedArgumentError(
                "expected a cache as a step has left it, got one that was cut, joined or reordered on the host, which "
                "one on several hosts cannot be; use greedy search or sampling, or run on one host"
            )
        return np.asarray(leaf)

    def _local_array(self, leaf: Any) -> jax.Array:
        """Returns an argument that all hosts have, on the leader's part of the mesh."""
        return self._on_mesh(self._known[id(leaf)])

    @staticmethod
    def _on_mesh(known: _RemoteArray) -> jax.Array:
        array = known.array() if isinstance(known.array, weakref.ref) else known.array
        assert array is not None
        return array

    def _result(self, array: jax.Array, number: int) -> jax.Array:
        """Returns a result for the caller, who may pass it to a program again."""
        held: weakref.ref[jax.Array] | jax.Array
        if array.sharding.is_fully_replicated:
            held, mine = array, jax.device_put(array.addressable_data(0), jax.local_devices()[0])
        else:
            mine, held = array, weakref.ref(array)
        self._known[id(mine)] = _RemoteArray(number, held)
        weakref.finalize(mine, self._drop, id(mine), number).atexit = False
        return mine

    def _drop(self, identity: int, number: int) -> None:
        del self._known[identity]
        self._dropped.append(number)

    def close(self) -> None:
        """Ends the followers and the connections; may be called twice."""
        atexit.unregister(self.close)
        with self._order:
            if self._is_over:
                return
            self._is_over = True
            for follower in self._followers:
                follower.stop()
                with contextlib.suppress(OSError):
                    follower.wire.send_command(End())
            jax.distributed.shutdown()
            for follower in self._followers:
                follower.close()


@dataclasses.dataclass(frozen=True)
class MultiHostExecutable:
    """Program that all hosts run."""

    mirror: Leader
    number: int
    program: Any

    def __call__(self, weights: Weights, *args: Any) -> Any:
        """Runs the program on all hosts."""
        return self.mirror.run(self.number, self.program, weights, args)

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results."""
        return self.program.out_info

    def memory_analysis(self) -> Any:
        """Returns the memory analysis of the program on one device."""
        return self.program.memory_analysis()
