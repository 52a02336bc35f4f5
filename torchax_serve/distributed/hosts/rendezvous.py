"""Rendezvous of a model's hosts at one address.

It checks that they are alike before they share anything.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version

import jax

from model_adapters.errors import HostsError
from torchax_serve.compilation.environment import LIBRARIES, source_digest
from torchax_serve.distributed.hosts.acceptor import BACKLOG, GREETING_S, Acceptor
from torchax_serve.distributed.hosts.connection import SAID, Connection
from torchax_serve.distributed.hosts.handshake import NotAHostError, SecretError, greet_leader
from torchax_serve.distributed.hosts.heartbeat import Heartbeat
from torchax_serve.distributed.hosts.options import Hosts

logger = logging.getLogger("torchax_serve")

PROGRAM = "torchax-serve"
RETRY_S = 0.25
SHUTDOWN_S = 30
MIN_JAX_START_S = 10.0
"""Smallest time limit of `jax.distributed`, in seconds, even if hosts met at the last moment."""


def rendezvous(hosts: Hosts, asked: Mapping[str, str]) -> list[Heartbeat]:
    """Meets the other hosts and starts `jax.distributed` with them.

    Args:
        hosts: All hosts, and the number of this one.
        asked: Arguments of this host's `serve`, which must be the same on all hosts.

    Returns:
        The connections, watched: to all followers in the order of their numbers, or to the leader.

    Raises:
        HostsError: A host did not come, is not alike, or another leader has the address.
    """
    if jax.distributed.is_initialized():
        raise HostsError("hosts: expected a process that has not joined any, got one that has; start another process")
    deadline = time.monotonic() + hosts.join_timeout_s
    if hosts.secret is None and not _is_loopback(hosts.address[0]):
        logger.warning(
            "hosts: no secret is given, so whoever reaches %s can join; give all hosts one (--hosts-secret-file)",
            hosts.coordinator,
        )
    hello = {"program": PROGRAM, "num_hosts": str(hosts.num_hosts), **installed(), **asked}
    watches = _gather(hosts, hello, deadline) if hosts.is_leader else [_report_to_leader(hosts, hello, deadline)]
    try:
        jax.distributed.initialize(
            hosts.jax_address,
            hosts.num_hosts,
            hosts.host_id,
            initialization_timeout=int(max(MIN_JAX_START_S, deadline - time.monotonic())),
            # JAX's own service has no secret: it listens on the leader's address, not on all addresses.
            coordinator_bind_address=_jax_bind_address(hosts) if hosts.is_leader else None,
            cluster_detection_method="deactivate",
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise HostsError(f"jax.distributed did not start: {said}; start a new process") from error
    return watches


def installed() -> dict[str, str]:
    """Returns the versions that must be the same on all hosts.

    With the same versions they compile the same programs.
    """
    libraries = {name: version(name) for name in LIBRARIES}
    return {"source code": source_digest()[:16], "python": ".".join(map(str, sys.version_info[:2])), **libraries}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Describes the first difference between the leader and another host; None if there is none."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            return f"{name} {theirs.get(name, 'unknown')}, host 0 has {ours.get(name, 'none')}"
    return None


def follower_watch(wire: Connection, host_id: int) -> Heartbeat:
    """Returns the leader's heartbeat of a follower."""
    return Heartbeat(wire, f"host {host_id}", "the run has ended; start all hosts again")


def _gather(hosts: Hosts, hello: Mapping[str, str], deadline: float) -> list[Heartbeat]:
    """Waits for all followers, the leader's part."""
    wires: dict[int, Connection] = {}
    try:
        with Acceptor(_listening(hosts), hosts.secret_bytes, PROGRAM) as acceptor:
            while len(wires) < hosts.num_hosts - 1:
                came = acceptor.next_host(deadline - time.monotonic())
                if came is None:
                    raise _missing(hosts, wires, acceptor.num_turned_away)
                _admit(*came, hosts, hello, wires)
        for host_id, wire in wires.items():
            try:
                wire.send_status(go=hosts.jax_address)
            except OSError as error:
                raise HostsError(f"host {host_id} is gone ({error}); start all hosts again") from error
    except BaseException:
        for wire in wires.values():
            with contextlib.suppress(OSError):
                wire.send_status(refused="host 0 could not gather all hosts")
            wire.close()
        raise
    return [follower_watch(wires[host_id], host_id) for host_id in sorted(wires)]


def _missing(hosts: Hosts, wires: Mapping[int, Connection], num_turned_away: int) -> HostsError:
    missing = sorted(set(range(1, hosts.num_hosts)) - set(wires))
    away = f" ({num_turned_away} calls with another secret were turned away)" if num_turned_away else ""
    return HostsError(
        f"expected {hosts.num_hosts - 1} more hosts within {hosts.join_timeout_s:g} s, host "
        f"{', '.join(map(str, missing))} did not come{away}; start it with --host-id {missing[0]} and --coordinator "
        f"{hosts.coordinator}"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _resolved(hosts: Hosts) -> tuple[socket.AddressFamily, str]:
    """Returns the address family and address that the leader listens on."""
    host, port = hosts.address
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, str(address[0])


def _jax_bind_address(hosts: Hosts) -> str:
    family, address = _resolved(hosts)
    return f"[{address}]:{hosts.address[1] + 1}" if family == socket.AF_INET6 else f"{address}:{hosts.address[1] + 1}"


def _listening(hosts: Hosts) -> socket.socket:
    """Returns the leader's listening socket; checks that the port for JAX is free as well."""
    port = hosts.address[1]
    try:
        family, address = _resolved(hosts)
        with socket.create_server((address, port + 1), family=family):
            pass
        return socket.create_server((address, port), family=family, backlog=max(BACKLOG, hosts.num_hosts))
    except OSError as error:
        expected = f"expected host 0 to listen at {hosts.coordinator} and the port behind it, "
        if error.errno == errno.EADDRINUSE:
            raise HostsError(
                f"{expected}got a port that is taken; another host 0 is running there, or another program: end it, or "
                "choose another port for all hosts"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise HostsError(
                f"{expected}got an address that is not this machine's; there is one leader, number the other hosts "
                "from 1"
            ) from error
        raise HostsError(f"{expected}got {error}; check the address") from error


def _admit(
    wire: Connection, said: dict[str, str], hosts: Hosts, hello: Mapping[str, str], wires: dict[int, Connection]
) -> None:
    """Adds a host to `wires`, by its number.

    Raises:
        HostsError: The host is not alike, or its number is taken.
    """
    host_id = said.pop("host_id", None)
    why = difference(hello, said)
    if why is None and (type(host_id) is not int or not 0 < host_id < hosts.num_hosts or host_id in wires):
        why = f"the number {host_id}, which is another host's"
    if why is not None:
        with contextlib.suppress(OSError):
            wire.send_status(refused=f"this host has {why}")
        wire.close()
        raise HostsError(f"expected hosts that are alike, got host {host_id} with {why}; start all hosts alike")
    wires[host_id] = wire


def _report_to_leader(hosts: Hosts, hello: Mapping[str, str], deadline: float) -> Heartbeat:
    """Sends hello to the leader and waits until all others have; a follower's part."""
    wire = _connected(hosts, deadline)
    try:
        wire.send_status(host_id=hosts.host_id, **hello)
        frame = wire.receive(max(0.0, deadline - time.monotonic()))
    except OSError as error:
        wire.close()
        raise HostsError(f"host 0 at {hosts.coordinator} is gone ({error}); start all hosts again") from error
    said = frame[1] if frame is not None and frame[0] == SAID else {}
    if "go" not in said:
        wire.close()
        why = said.get("refused", f"no answer within {hosts.join_timeout_s:g} s")
        raise HostsError(f"expected to join host 0 at {hosts.coordinator}, got: {why}; start all hosts alike")
    return Heartbeat(wire, f"host 0 at {hosts.coordinator}", "the run has ended; start all hosts again")


def _connected(hosts: Hosts, deadline: float) -> Connection:
    """Returns a connection to the leader, which has proved the secret; tries until `deadline`."""
    while True:
        sock = None
        try:
            left = max(0.1, min(GREETING_S, deadline - time.monotonic()))
            sock = socket.create_connection(hosts.address, timeout=left)
            session = greet_leader(sock, hosts.secret_bytes, time.monotonic() + left)
            return Connection(sock, accepts_commands=True, session=session)
        except SecretError as error:
            sock.close()  # type: ignore[union-attr]
            raise HostsError(
                f"expected host 0 at {hosts.coordinator} to have the secret of this host, got: {error}; give all hosts "
                "the same secret (--hosts-secret-file)"
            ) from error
        except OSError as error:
            if sock is not None:
                sock.close()
            if time.monotonic() + RETRY_S > deadline:
                got = f"somebody else there ({error})" if isinstance(error, NotAHostError) else error
                raise HostsError(
                    f"expected host 0 at {hosts.coordinator} within {hosts.join_timeout_s:g} s, got {got}; start it "
                    "with --host-id 0, or check address and firewall"
                ) from error
        time.sleep(RETRY_S)
