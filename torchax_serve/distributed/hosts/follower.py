"""Follower: runs the programs of the leader on the model's shards of its own devices."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax

from model_adapters.errors import HostsError
from model_adapters.sharding.model_sharding import ModelSharding
from torchax_serve.distributed.hosts.heartbeat import Heartbeat, wait_for_host_error
from torchax_serve.distributed.hosts.leader import compile_for_hosts, launch_in_order
from torchax_serve.distributed.hosts.message_codec import CodecError, decode
from torchax_serve.distributed.hosts.messages import ArrayRef, ArraySpec, Compile, End, Run, spread
from torchax_serve.executors.packed.executor import PackedExecutor
from torchax_serve.executors.per_sequence.executor import PerSequenceExecutor
from torchax_serve.executors.per_sequence.factory import wanted_block_len
from torchax_serve.executors.per_sequence.forward import SequenceForward
from torchax_serve.executors.per_sequence.scales import TRIAL, sequence_trial
from torchax_serve.kv_cache.cache_layout import CacheLayout
from torchax_serve.kv_cache.multihost_pools import MultiHostPoolAllocator
from torchax_serve.kv_cache.pools import CacheAllocation, PagedCache
from torchax_serve.kv_cache.scales import packed_trial
from torchax_serve.kv_cache.slot_states import PagedCacheWithStates
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler import SpeculativeConfig


class Follower:
    """Receiver of the leader's commands, which runs them.

    Args:
        runtime: Runtime of the model on the mesh of all hosts.
        leader: Connection to the leader.
    """

    def __init__(self, runtime: ModelRuntime, leader: Heartbeat) -> None:
        self._runtime, self._leader = runtime, leader
        assert runtime.program.sharding is not None
        self._mesh = runtime.program.sharding.mesh
        self._owners = functions_of(runtime, runtime.program.sharding)
        self._programs: dict[int, tuple[Any, Any]] = {}  # with the tree of its arguments
        self._held: dict[int, jax.Array] = {}

    def run(self) -> None:
        """Runs commands until the leader ends the run.

        Raises:
            HostsError: The leader has reported an error.
        """
        while True:
            try:
                order = decode(self._leader.incoming.get())
            except CodecError as error:
                raise HostsError(
                    f"expected an order of host 0, got something else ({error}); start all alike"
                ) from error
            if isinstance(order, End):
                self._leader.stop()
                jax.distributed.shutdown()
                self._leader.close()
                if order.why is not None:
                    raise HostsError(f"host 0 has ended the run: {order.why}")
                return
            if isinstance(order, Compile):
                self._compile(order)
            elif isinstance(order, Run):
                self._run(order)
            else:
                raise HostsError(f"expected an order of host 0, got {type(order).__name__}; start all hosts alike")

    def _compile(self, order: Compile) -> None:
        weights = self._runtime.weights if order.has_weights else {}
        functions = self._runtime.steps.executables.functions
        if order.function in (PerSequenceExecutor.FUNCTION, TRIAL) and order.function not in functions:
            self._owners += per_sequence_functions_of(self._runtime)
        function = functions[order.function]
        function.restore_facts(order.facts)

        def here(leaf: ArrayRef | ArraySpec) -> Any:
            return self._held[leaf.number] if isinstance(leaf, ArrayRef) else leaf.abstract(self._mesh)

        args = jax.tree.map(here, order.args, is_leaf=lambda leaf: isinstance(leaf, ArrayRef | ArraySpec))
        try:
            with jax.default_matmul_precision(order.precision) if order.precision else contextlib.nullcontext():
                program = compile_for_hosts(function, self._mesh, weights, args, order.spec)
        except Exception as error:  # reported by the leader, if it fails there too; no reason to end
            self._leader.wire.send_status(
                compiled=order.program, error=" ".join(f"{type(error).__name__}: {error}".split())
            )
            return
        self._programs[order.program] = functools.partial(program, weights), jax.tree.structure(args)
        self._leader.wire.send_status(compiled=order.program)

    def _run(self, order: Run) -> None:
        for number in order.dropped:
            self._held.pop(number, None)
        program, tree = self._programs[order.program]
        leaves = [
            self._held[leaf.number] if isinstance(leaf, ArrayRef) else spread(leaf, self._mesh) for leaf in order.leaves
        ]
        out = jax.tree.leaves(launch_in_order(self._mesh, program, *jax.tree.unflatten(tree, leaves)))
        self._held.update(enumerate(out, order.first))


def functions_of(runtime: ModelRuntime, sharding: ModelSharding) -> list[Any]:
    """Returns owners of the functions, other than the runtime's, that a leader may name.

    They must stay alive. Their pages are arguments, so this cache has no pages.
    """
    programs = runtime.steps.executables
    cache = PagedCache(CacheAllocation((), (), page_size=1, max_len=1))
    packed = PackedExecutor(
        runtime.program,
        runtime.weights,
        cache,
        programs,
        num_slots=1,
        token_budget=16,
        speculative=SpeculativeConfig(),  # whose functions take numbers and lengths of drafts from the leader
    )
    return [packed, MultiHostPoolAllocator(programs, sharding), packed_trial(runtime)]


def per_sequence_functions_of(runtime: ModelRuntime) -> list[Any]:
    """Returns owners of the functions of a model that is not packed; see `functions_of`.

    What a request stores is found by tracing the model, which takes seconds; the leader finds the same.
    """
    forward = SequenceForward(runtime)
    cache = PagedCacheWithStates(CacheAllocation((), (), page_size=1, max_len=1), CacheLayout(()), num_slots=1)
    programs, layout = runtime.steps.executables, forward.layout()
    executor = PerSequenceExecutor(
        forward, runtime.weights, cache, programs, layout, num_slots=1, chunk_sizes=(1,), is_exact=True
    )
    return [executor, sequence_trial(runtime, forward, layout, wanted_block_len(layout))]


def follow(runtime: ModelRuntime, leader: Heartbeat) -> None:
    """Runs the leader's programs until it ends; see `Follower`."""
    try:
        Follower(runtime, leader).run()
    except jax.errors.JaxRuntimeError:
        wait_for_host_error()  # the loss of a host is the better error
        raise
