"""Options of a deployment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.validation.argument_checks import KV_CACHE_DTYPES

ROUTER = "torchax_serve.distributed.ray.router.PrefixRouter"


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
        max_body_bytes: Largest body of an HTTP request, in bytes.
        stall_s: Seconds without a new piece after which an answer is cancelled.
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
    max_body_bytes: int = 4 << 20
    stall_s: float = 600.0

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
        if self.max_body_bytes < 1:
            raise InvalidArgumentError(f"max_body_bytes: expected a whole number >= 1, got {self.max_body_bytes!r}")
        if self.max_num_seqs < 1:
            raise InvalidArgumentError(f"max_num_seqs: expected a whole number >= 1, got {self.max_num_seqs}")
        if self.kv_cache_dtype not in (None, *KV_CACHE_DTYPES):
            names = " or ".join(KV_CACHE_DTYPES)
            raise InvalidArgumentError(f"kv_cache_dtype: expected {names}, got {self.kv_cache_dtype!r}")
        if self.accelerator not in (None, "GPU", "TPU"):
            raise InvalidArgumentError(f"accelerator: expected GPU or TPU, got {self.accelerator!r}")

    def actor_options(self) -> dict[str, Any]:
        """Resources that Ray reserves for a replica."""
        number = self.tensor_parallel or 1
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
        kinds = {field.name: str(field.type).partition(" |")[0] for field in dataclasses.fields(cls)}
        if unknown := sorted(set(arguments) - set(kinds)):
            raise InvalidArgumentError(f"expected arguments out of {', '.join(kinds)}, got {', '.join(unknown)}")
        made: dict[str, Any] = {}
        for name, value in arguments.items():
            try:
                made[name] = {"int": int, "float": float, "str": str}[kinds[name]](value)
            except ValueError as error:
                raise InvalidArgumentError(f"{name}: expected a number, got {value!r}") from error
        return cls(**made)
