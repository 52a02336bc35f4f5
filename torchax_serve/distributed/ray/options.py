"""Options of a deployment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.server.options import ServerOptions
from torchax_serve.validation.argument_checks import KV_CACHE_DTYPES

ROUTER = "torchax_serve.distributed.ray.router.PrefixRouter"
_ADDRESS = "connections are those of Ray's proxy; leave it out, or put a proxy with it in front"
_ONE = "it would be of one replica alone; leave it out, or serve without Ray"
_REFUSED = {
    **dict.fromkeys(("uds", "tls_certificate", "tls_key", "tls_client_ca"), _ADDRESS),
    **dict.fromkeys(("max_connections", "max_connections_per_address", "header_timeout_s"), _ADDRESS),
    **dict.fromkeys(("write_timeout_s", "keep_alive_timeout_s"), _ADDRESS),
    **dict.fromkeys(("profile_dir", "file_storage_path", "allow_runtime_lora_updating"), _ONE),
    "allow_model_downloads": _ONE,
    **dict.fromkeys(("max_loaded_models", "model_memory_bytes", "model_idle_timeout_s"), "a replica has one model"),
    **dict.fromkeys(("pre_stop_s", "drain_timeout_s"), "drain_s has the time for requests of a replica that ends"),
}
"""Options of the server that replicas cannot honour, and why."""
_SCALARS = {"int": int, "float": float, "str": str, "Path": Path}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """Replicas of a model on a Ray cluster.

    Attributes:
        model: Short name, hub id or folder that every node has; None is the model of the package.
        dtype: Dtype of the weights.
        quantization: Preset, or file of rules that every node has, for weights with fewer bits; None: as the
            checkpoint has them.
        tensor_parallel: Number of devices of a replica, all on one node.
        min_replicas, max_replicas: Limits of autoscaling; Ray adds replicas above `max_num_seqs` requests per replica.
        upscale_delay_s, downscale_delay_s: Seconds of higher or lower load before replicas are added or removed.
        max_num_seqs: Number of requests that a replica runs at once.
        max_model_len: Number of tokens of a request, prompt and answer.
        kv_cache_dtype: ``int8`` or ``fp8`` stores keys and values in 8 bits; None: in the model's dtype.
        accelerator: Ray's resource for the `tensor_parallel` devices: ``GPU`` or ``TPU``; None: CPU cores.
        num_cpus: Number of CPU cores that Ray reserves for a replica.
        health_check_period_s, health_check_timeout_s: Period and time limit of health checks, in seconds.
        drain_s: Seconds that a replaced replica may continue its requests.
        max_num_waiting: Requests that wait for a replica; one more is answered with 429.
        engine: Further options of the engine, by the names of `EngineOptions`.
        load: Further arguments of `torchax_serve.serve`, such as `adapters`.
        server: Options of the server that each replica runs; those of connections are Ray's.
    """

    model: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    tensor_parallel: int | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    max_num_seqs: int = 32
    max_model_len: int | None = None
    kv_cache_dtype: str | None = None
    accelerator: str | None = None
    num_cpus: float = 1.0
    health_check_period_s: float = 10.0
    health_check_timeout_s: float = 30.0
    drain_s: float = 120.0
    max_num_waiting: int = 256
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    load: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    server: ServerOptions = dataclasses.field(default_factory=ServerOptions)

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InvalidArgumentError(
                f"min_replicas and max_replicas: expected 1 <= min <= max, got {self.min_replicas} and "
                f"{self.max_replicas}; correct them"
            )
        for name in [field.name for field in dataclasses.fields(self) if field.name.endswith("_s")]:
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value < math.inf:
                raise InvalidArgumentError(f"{name}: expected a number of seconds >= 0, got {value!r}")
        if not 0 < self.num_cpus < math.inf:
            raise InvalidArgumentError(f"num_cpus: expected a number > 0, got {self.num_cpus!r}")
        for name in ("max_num_seqs", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}: expected a whole number >= 1, got {getattr(self, name)}")
        for path in self.server.changed():
            name = path.rpartition(".")[2]
            if name in _REFUSED:
                raise UnsupportedArgumentError(
                    f"{name}: expected its default for replicas, got another; {_REFUSED[name]}"
                )
        if self.server.max_stored_responses and self.max_replicas > 1:
            raise UnsupportedArgumentError(
                f"max_stored_responses: expected 0 for several replicas, got {self.server.max_stored_responses}; {_ONE}"
            )
        if self.kv_cache_dtype not in (None, *KV_CACHE_DTYPES):
            names = " or ".join(KV_CACHE_DTYPES)
            raise InvalidArgumentError(f"kv_cache_dtype: expected {names}, got {self.kv_cache_dtype!r}")
        if self.accelerator not in (None, "GPU", "TPU"):
            raise InvalidArgumentError(f"accelerator: expected GPU or TPU, got {self.accelerator!r}")

    def actor_options(self) -> dict[str, Any]:
        """Resources that Ray reserves for a replica."""
        number = math.prod((self.load.get("mesh") or {"model": self.tensor_parallel or 1}).values())
        if self.accelerator == "GPU":
            return {"num_cpus": self.num_cpus, "num_gpus": number}
        if self.accelerator == "TPU":
            return {"num_cpus": self.num_cpus, "resources": {"TPU": number}}
        return {"num_cpus": self.num_cpus}

    def check_nodes(self, nodes: Sequence[Mapping[str, float]]) -> None:
        """Checks that a node of the cluster has the resources of a replica, which runs on one node.

        Args:
            nodes: Total resources of each node, by Ray's names.

        Raises:
            UnsupportedArgumentError: No node has them; Ray would wait for one forever.
        """
        options = self.actor_options()
        takes = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        takes = {name: number for name, number in takes.items() if number}
        if any(all(node.get(name, 0) >= number for name, number in takes.items()) for node in nodes):
            return
        wanted = " and ".join(f"{number:g} {name}" for name, number in takes.items())
        most = ", ".join(f"{max((node.get(name, 0) for node in nodes), default=0):g} {name}" for name in takes)
        raise UnsupportedArgumentError(
            f"expected a node with {wanted} for a replica, got nodes with at most {most}; a replica cannot span "
            "several nodes: lower tensor_parallel, or serve over several hosts without Ray (--coordinator)"
        )

    @classmethod
    def of_text(cls, arguments: Mapping[str, str]) -> DeployOptions:
        """Builds options from text, as on command lines.

        Raises:
            InvalidArgumentError: A name is unknown, or a value has another type.
        """
        kinds, kinds_of_server = _scalars_of(cls), _scalars_of(ServerOptions)
        if unknown := sorted(set(arguments) - set(kinds) - set(kinds_of_server)):
            known = ", ".join(dict.fromkeys([*kinds, *kinds_of_server]))
            raise InvalidArgumentError(f"expected arguments out of {known}, got {', '.join(unknown)}")
        made: dict[str, Any] = {}
        of_server: dict[str, Any] = {"host": "0.0.0.0"}  # the address is Ray's, and clients call it by any name
        for name, value in arguments.items():
            try:
                if name in kinds:
                    made[name] = _SCALARS[kinds[name]](value)
                else:
                    of_server[name] = _SCALARS[kinds_of_server[name]](value)
            except ValueError as error:
                raise InvalidArgumentError(f"{name}: expected a number, got {value!r}") from error
        return cls(**made, server=ServerOptions(**of_server))


def _scalars_of(options: type) -> dict[str, str]:
    """Returns the types of those fields of a dataclass that a text can give."""
    kinds = {field.name: str(field.type).partition(" |")[0] for field in dataclasses.fields(options)}
    return {name: kind for name, kind in kinds.items() if kind in _SCALARS}
