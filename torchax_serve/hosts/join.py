"""How the hosts of a model find each other: all at one address, checked to be alike before anything is shared."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version

import jax

from model_adapters.errors import HostsError
from torchax_serve.hosts.options import Hosts
from torchax_serve.hosts.watch import Watch
from torchax_serve.hosts.wire import SAID, Wire
from torchax_serve.program_cache import LIBRARIES, source_digest

PROGRAM = "torchax-serve"
RETRY_S = 0.25
SHUTDOWN_S = 30
HELLO_S = 5.0
"""How long somebody who has connected may take to say who they are."""


def join(hosts: Hosts, asked: Mapping[str, str]) -> list[Watch]:
    """Meets the other hosts and starts `jax.distributed` with them.

    Args:
        hosts: all, and which one this is.
        asked: what this host was asked to serve, by argument; has to be the same everywhere.

    Returns:
        The connections, watched: to all followers in the order of their numbers, or to the leader.

    Raises:
        HostsError: somebody did not come, is not alike, or has the leader's place already.
    """
    if jax.distributed.is_initialized():
        raise HostsError("hosts: expected a process that has not joined any, got one that has; start another process")
    hello = {"program": PROGRAM, "num_hosts": str(hosts.num_hosts), **installed(), **asked}
    watches = _gather(hosts, hello) if hosts.is_leader else [_report_to_leader(hosts, hello)]
    try:
        jax.distributed.initialize(
            hosts.jax_address,
            hosts.num_hosts,
            hosts.host_id,
            cluster_detection_method="deactivate",
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise HostsError(f"jax.distributed did not start: {said}; start a new process") from error
    return watches


def installed() -> dict[str, str]:
    """What has to be the same on all hosts so that they compile the same programs."""
    libraries = {name: version(name) for name in LIBRARIES}
    return {"source code": source_digest()[:16], "python": ".".join(map(str, sys.version_info[:2])), **libraries}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first thing that the leader has otherwise than another host, in words; None if there is none."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            return f"{name} {theirs.get(name, 'unknown')}, host 0 has {ours.get(name, 'none')}"
    return None


def follower_watch(wire: Wire, host_id: int) -> Watch:
    """The leader's watch over a follower."""
    return Watch(wire, f"host {host_id}", "the run has ended; start all hosts again")


def _gather(hosts: Hosts, hello: Mapping[str, str]) -> list[Watch]:
    """Waits for all followers, the leader's part."""
    wires: dict[int, Wire] = {}
    try:
        with _listening(hosts) as server:
            deadline = time.monotonic() + hosts.join_timeout_s
            while len(wires) < hosts.num_hosts - 1:
                _accept(server, deadline, hosts, hello, wires)
        for wire in wires.values():
            wire.say(go=hosts.jax_address)
    except BaseException:
        for wire in wires.values():
            with contextlib.suppress(OSError):
                wire.say(refused="host 0 could not gather all hosts")
            wire.close()
        raise
    return [follower_watch(wires[host_id], host_id) for host_id in sorted(wires)]


def _listening(hosts: Hosts) -> socket.socket:
    """The leader's socket; the port for JAX is tried as well."""
    host, port = hosts.address
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server((address[0], port + 1), family=family):
            pass
        return socket.create_server((address[0], port), family=family, backlog=hosts.num_hosts)
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


def _accept(
    server: socket.socket, deadline: float, hosts: Hosts, hello: Mapping[str, str], wires: dict[int, Wire]
) -> None:
    """Takes one connection, if there is one soon, and adds it to `wires`."""
    left = deadline - time.monotonic()
    if left <= 0:
        missing = sorted(set(range(1, hosts.num_hosts)) - set(wires))
        names = ", ".join(map(str, missing))
        raise HostsError(
            f"expected {hosts.num_hosts - 1} more hosts within {hosts.join_timeout_s:g} s, host {names} did not come; "
            f"start it with --host-id {missing[0]} and --coordinator {hosts.coordinator}"
        )
    server.settimeout(min(left, 1.0))
    try:
        sock, _ = server.accept()
    except TimeoutError:
        return
    wire = Wire(sock)
    try:
        frame = wire.receive(min(left, HELLO_S))
    except OSError:
        frame = None
    if frame is None or frame[0] != SAID or frame[1].get("program") != PROGRAM:
        wire.close()  # a port scanner, a browser: nobody of ours
        return
    said = dict(frame[1])
    host_id = said.pop("host_id", None)
    why = difference(hello, said)
    if why is None and (type(host_id) is not int or not 0 < host_id < hosts.num_hosts or host_id in wires):
        why = f"the number {host_id}, which is another host's"
    if why is not None:
        with contextlib.suppress(OSError):
            wire.say(refused=f"this host has {why}")
        wire.close()
        raise HostsError(f"expected hosts that are alike, got host {host_id} with {why}; start all hosts alike")
    wires[host_id] = wire


def _report_to_leader(hosts: Hosts, hello: Mapping[str, str]) -> Watch:
    """Says hello to the leader and waits until all others have, a follower's part."""
    deadline = time.monotonic() + hosts.join_timeout_s
    wire = _connected(hosts, deadline)
    try:
        wire.say(host_id=hosts.host_id, **hello)
        frame = wire.receive(max(0.0, deadline - time.monotonic()))
    except OSError as error:
        wire.close()
        raise HostsError(f"host 0 at {hosts.coordinator} is gone ({error}); start all hosts again") from error
    said = frame[1] if frame is not None and frame[0] == SAID else {}
    if "go" not in said:
        wire.close()
        why = said.get("refused", f"no answer within {hosts.join_timeout_s:g} s")
        raise HostsError(f"expected to join host 0 at {hosts.coordinator}, got: {why}; start all hosts alike")
    return Watch(wire, f"host 0 at {hosts.coordinator}", "the run has ended; start all hosts again")


def _connected(hosts: Hosts, deadline: float) -> Wire:
    while True:
        try:
            return Wire(socket.create_connection(hosts.address, timeout=HELLO_S), takes_orders=True)
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise HostsError(
                    f"expected host 0 at {hosts.coordinator} within {hosts.join_timeout_s:g} s, got {error}; start it "
                    "with --host-id 0, or check address and firewall"
                ) from error
        time.sleep(RETRY_S)
