"""`follow`: runs a host whose devices serve the model of another host."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading import load_model
from torchax_serve.compilation import gc_pause
from torchax_serve.compilation.xla_cache import enable_compile_cache
from torchax_serve.distributed.hosts.follower import follow as obey
from torchax_serve.distributed.hosts.options import Hosts
from torchax_serve.distributed.hosts.startup import joined, load_digest, mesh_of_hosts, shared_arguments
from torchax_serve.engine.replica_runtimes import split_runtimes


def follow(
    model: str | os.PathLike[str] | PreTrainedModel | None = None,
    *,
    hosts: Hosts,
    mesh: Mapping[str, int] | None = None,
    tensor_parallel: int | None = None,
    **loading: Any,
) -> None:
    """Lends this host's devices to a model that host 0 serves; returns when that is closed.

    Args:
        model: Model of host 0, possibly in another folder.
        hosts: Hosts as on host 0, with the number of this host.
        mesh, tensor_parallel: As on host 0.
        loading: Further arguments of `serve` about loading.

    Raises:
        HostsError: host 0 cannot be found, is not alike, or has ended the run with an error. Where it is lost in the
            middle of one, there is a line on stderr and the process ends.
        TorchaxServeError: as `serve`.
    """
    if hosts.is_leader:
        raise InvalidArgumentError("hosts: expected the number of a follower, got 0, the leader's; call serve()")
    inspect.signature(load_model).bind(model, **loading)  # a wrong name is an error before other hosts wait
    enable_compile_cache()
    with gc_pause.paused(), joined(hosts, model, shared_arguments(loading, mesh, tensor_parallel)) as (leader,):
        loaded = load_model(model, mesh=mesh_of_hosts(hosts, mesh, tensor_parallel), **loading)
        assert loaded.sharding is not None
        (runtime,) = split_runtimes(loaded.module, loaded.weights, loaded.sharding)
        leader.wire.send_status(loaded=load_digest(loaded))
    obey(runtime, leader)
