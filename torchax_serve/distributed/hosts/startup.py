"""Startup of leader and followers before the first request.

They meet, load their models, and compare them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from model_adapters.errors import HostsError, InvalidArgumentError, UnsupportedArgumentError
from model_adapters.loading import LoadedModel
from torchax_serve.distributed.hosts.heartbeat import Heartbeat
from torchax_serve.distributed.hosts.messages import End
from torchax_serve.distributed.hosts.options import Hosts
from torchax_serve.distributed.hosts.rendezvous import rendezvous
from torchax_serve.distributed.mesh import mesh_for

MAX_COMPARED_BYTES = 1 << 20
"""Largest size of a tensor that is compared between hosts, in bytes; norms and biases are smaller."""


@contextlib.contextmanager
def joined(hosts: Hosts, model: Any, asked: Mapping[str, Any]) -> Iterator[list[Heartbeat]]:
    """Yields the connections to the other hosts, which are notified if the context fails.

    Args:
        hosts: all, and which one this is.
        model: Name or folder; hosts may have it in different places.
        asked: Other arguments that hosts must have in common.

    Raises:
        HostsError: see `join`.
    """
    name = "the embedded one" if model is None else type(model).__name__
    if isinstance(model, str | os.PathLike):
        name = os.path.basename(model)
    watches = rendezvous(hosts, {"model": name, **{key: str(value) for key, value in asked.items()}})
    try:
        yield watches
    except BaseException as error:
        why = " ".join(f"{error}".split()) or type(error).__name__
        for watch in watches:
            watch.stop()
            with contextlib.suppress(OSError):
                if hosts.is_leader:
                    watch.wire.send_command(End(why))
                else:
                    watch.wire.send_status(failed=why)
        if hosts.is_leader:
            jax.distributed.shutdown()  # in step with the followers, whose part of it ends with this process
        for watch in watches:
            watch.close()
        raise


def mesh_of_hosts(hosts: Hosts, mesh: Mesh | Mapping[str, int] | None, tensor_parallel: int | None) -> Mesh:
    """Returns the mesh of all devices of all hosts: the requested one, or all on ``model``.

    Raises:
        InvalidArgumentError: The mesh leaves devices out.
        UnsupportedArgumentError: The mesh has replicas.
    """
    number = len(jax.devices())
    if mesh is None and tensor_parallel is None:
        tensor_parallel = number
    made = mesh_for(mesh, tensor_parallel)
    if made is None or made.devices.size != number:
        raise InvalidArgumentError(
            f"mesh: expected all {number} devices of the {hosts.num_hosts} hosts, got "
            f"{1 if made is None else made.devices.size}; leave it out, or spread the model over all of them"
        )
    if made.shape["data"] > 1:
        raise UnsupportedArgumentError(
            f"mesh: expected no replicas over several hosts, got data {made.shape['data']}; serve each by itself"
        )
    return made


def load_digest(loaded: LoadedModel) -> dict[str, str]:
    """Returns digests of the loaded data that must be the same on all hosts."""
    assert loaded.sharding is not None
    config = {key: value for key, value in loaded.config.to_dict().items() if key != "_name_or_path"}
    layout = [
        (name, array.shape, str(array.dtype), str(loaded.sharding.placed[name].spec))
        for name, array in sorted(loaded.weights.items())
    ]
    values = hashlib.sha256()
    for _, weight in sorted(loaded.weights.items()):
        for array in jax.tree.leaves(weight):
            if array.is_fully_replicated and array.nbytes <= MAX_COMPARED_BYTES:
                values.update(np.asarray(array.addressable_data(0)).tobytes())
    return {
        "configuration": _digest(json.dumps(config, sort_keys=True, default=str)),
        "layout of the weights": _digest(repr(layout)),
        "values of the weights": values.hexdigest(),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_same_model(followers: Sequence[Heartbeat], facts: Mapping[str, str]) -> None:
    """Waits until all followers have loaded the model, and compares facts of all hosts.

    The leader's are `facts`.

    Raises:
        HostsError: A fact differs.
    """
    for follower in followers:
        theirs = follower.incoming.get().get("loaded", {})
        for name, ours in facts.items():
            if theirs.get(name) != ours:
                raise HostsError(
                    f"{follower.who} has loaded another model than host 0: the {name} differ; give all hosts the same "
                    "model and revision"
                )


def shared_arguments(
    loading: Mapping[str, Any], mesh: Mesh | Mapping[str, int] | None, tensor_parallel: int | None
) -> dict[str, Any]:
    """Returns the arguments that must be the same on all hosts."""
    shape = None if mesh is None else dict(mesh.shape if isinstance(mesh, Mesh) else mesh)
    same = {"dtype": "auto", "revision": None, "random_weights": False, "refuse_uneven": False, "requantize": False}
    said = {name: loading.get(name, usual) for name, usual in same.items()}
    said["quantization"] = str(loading.get("quantization"))
    return {**said, "mesh": shape, "tensor_parallel": tensor_parallel}
