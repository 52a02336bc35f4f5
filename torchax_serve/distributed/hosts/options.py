"""Options of a run on several hosts."""

from __future__ import annotations

import dataclasses
import math

from model_adapters.errors import InvalidArgumentError

MIN_SECRET_BYTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts that share a model. Every host has the same options, except its own number.

    Attributes:
        coordinator: ``HOST:PORT`` of host 0, as the others reach it; the port behind it is JAX's own.
        num_hosts: Number of hosts, at least 2.
        host_id: Number of this host; 0 is the leader, which serves, all others follow.
        join_timeout_s: Seconds that hosts wait for each other in all.
        secret: Secret that all hosts prove to each other first, at least 16 bytes; text is UTF-8. None:
            anyone who reaches the coordinator's port can join.
    """

    coordinator: str
    num_hosts: int
    host_id: int
    join_timeout_s: float = 300.0
    secret: str | bytes | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65535:
            raise InvalidArgumentError(
                f"coordinator: expected HOST:PORT with a port from 1 to 65534, got {self.coordinator!r}; give the "
                "address of host 0 and a free port"
            )
        if type(self.num_hosts) is not int or self.num_hosts < 2:
            raise InvalidArgumentError(
                f"num_hosts: expected a whole number >= 2, got {self.num_hosts!r}; leave it out on one host"
            )
        if type(self.host_id) is not int or not 0 <= self.host_id < self.num_hosts:
            raise InvalidArgumentError(
                f"host_id: expected a whole number from 0 to {self.num_hosts - 1}, got {self.host_id!r}; number the "
                "hosts from 0"
            )
        self._check_secret()
        if isinstance(self.join_timeout_s, bool) or not 0 < self.join_timeout_s < math.inf:
            raise InvalidArgumentError(f"join_timeout_s: expected a number of seconds > 0, got {self.join_timeout_s!r}")

    def _check_secret(self) -> None:
        if self.secret is None:
            return
        got = type(self.secret).__name__
        if isinstance(self.secret, str | bytes):
            if len(self.secret_bytes or b"") >= MIN_SECRET_BYTES:
                return
            got = f"{len(self.secret_bytes or b'')}"
        raise InvalidArgumentError(
            f"secret: expected {MIN_SECRET_BYTES} bytes or more, got {got}; make one: openssl rand -hex 32"
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the leader's channel."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def jax_address(self) -> str:
        """Address of `jax.distributed`: the port after the channel's."""
        host, _, port = self.coordinator.rpartition(":")
        return f"{host}:{int(port) + 1}"

    @property
    def secret_bytes(self) -> bytes | None:
        """Secret as bytes."""
        return self.secret.encode() if isinstance(self.secret, str) else self.secret

    @property
    def is_leader(self) -> bool:
        """Whether this host serves."""
        return self.host_id == 0
