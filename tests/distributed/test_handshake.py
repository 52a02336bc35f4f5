"""Strangers at the leader's door, hosts with other secrets, and what was recorded of a connection that was in order."""

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from ports import free_port

from model_adapters.errors import HostsError, InvalidArgumentError
from torchax_serve import Hosts
from torchax_serve.cli.shared.load_options import DeviceOptions
from torchax_serve.distributed.hosts import acceptor as accepting
from torchax_serve.distributed.hosts.connection import HEAD, ORDER, SAID, Connection
from torchax_serve.distributed.hosts.handshake import (
    GREETING_BYTES,
    MAGIC,
    NotAHostError,
    SecretError,
    greet_follower,
    greet_leader,
)
from torchax_serve.distributed.hosts.rendezvous import rendezvous

SECRET = "0123456789abcdef0123456789abcdef"
ASKED = {"model": "tiny"}


@pytest.fixture(autouse=True)
def initialized(monkeypatch):
    """The calls of `jax.distributed.initialize`, which does nothing here."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


def hosts_of(port, host_id, num_hosts=2, **options):
    options = {"join_timeout_s": 20, "secret": SECRET, **options}
    return Hosts(coordinator=f"127.0.0.1:{port}", num_hosts=num_hosts, host_id=host_id, **options)


def met(*hosts, before_the_last=lambda: None):
    """What `join` answers or raises for each of several hosts, side by side."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        futures = [pool.submit(rendezvous, each, ASKED) for each in hosts[:-1]]
        before_the_last()
        futures.append(pool.submit(rendezvous, hosts[-1], ASKED))
        results = [future.exception() or future.result() for future in futures]
    watches = [watch for result in results if isinstance(result, list) for watch in result]
    for watch in watches:
        watch.stop()
    for watch in watches:
        watch.close()
    return results


def pair():
    """Both ends of a connection of TCP: a follower's and a leader's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def greeted(follower_secret, leader_secret):
    """What both sides of a handshake answer or raise, and their sockets."""
    follower, leader = pair()
    deadline = time.monotonic() + 10
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(greet_leader, follower, follower_secret, deadline)
        other = pool.submit(greet_follower, leader, leader_secret, deadline)
        return one.exception() or one.result(), other.exception() or other.result(), follower, leader


def call(port, content=b"", num=1):
    """Connections to the leader, who may not listen yet, that have sent `content`."""
    made = []
    for _ in range(num):
        for _ in range(200):
            try:
                made.append(socket.create_connection(("127.0.0.1", port), timeout=20))
                break
            except OSError:
                time.sleep(0.05)
        made[-1].sendall(content)
    return made


@pytest.mark.parametrize("secret", [SECRET, None])
def test_hosts_of_one_secret_meet_on_the_address_given_alone(initialized, secret):
    port = free_port()
    leader, follower = met(hosts_of(port, 0, secret=secret), hosts_of(port, 1, secret=secret))
    assert [watch.who for watch in leader + follower] == ["host 1", f"host 0 at 127.0.0.1:{port}"]
    binds = {args[2]: kwargs["coordinator_bind_address"] for args, kwargs in initialized}
    assert binds == {0: f"127.0.0.1:{port + 1}", 1: None}
    assert all(10 <= kwargs["initialization_timeout"] <= 20 for _, kwargs in initialized)


def test_the_leader_listens_on_no_other_address():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(rendezvous, hosts_of(port, 0, join_timeout_s=2), ASKED)
        call(port)[0].close()
        with pytest.raises(OSError, match="refused"):  # as if by another network card
            socket.create_connection(("127.0.0.2", port), timeout=5)
        assert isinstance(joining.exception(), HostsError)


STRANGERS = {
    "silent": b"",
    "a browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "brackets": HEAD.pack(SAID, 200_000) + b"[" * 200_000,
    "an endless frame": HEAD.pack(ORDER, 2**63) + b"x" * 1000,
    "half a greeting": MAGIC,
    "a greeting and no more": MAGIC + b"s" + bytes(32),
    "a wrong proof": MAGIC + b"s" + bytes(64),
    "no secret": MAGIC + b"-" + bytes(64),
    "noise": bytes(range(256)) * 1000,
}


@pytest.fixture
def meet_among():
    """Has a leader and a follower meet after strangers have called."""
    open_still = []

    def meet(strangers, secret=SECRET):
        port, began = free_port(), []

        def let_them_call():
            open_still.extend(strangers(port))
            began.append(time.monotonic())

        hosts = [hosts_of(port, host_id, secret=secret) for host_id in range(2)]
        assert [len(watches) for watches in met(*hosts, before_the_last=let_them_call)] == [1, 1]
        return time.monotonic() - began[0]

    yield meet
    for each in open_still:
        each.close()


@pytest.mark.parametrize("secret", [SECRET, None])
def test_strangers_do_not_delay_hosts(meet_among, secret):
    seconds = meet_among(lambda port: [call(port, each)[0] for each in STRANGERS.values()], secret)
    assert seconds < 4  # none of the silent ones was waited for


def test_more_strangers_than_there_is_room_for(meet_among, monkeypatch):
    monkeypatch.setattr(accepting, "MAX_CALLERS", 8)

    def strangers(port):
        callers = call(port, num=40)
        assert callers[0].recv(1) == b""  # the longest waiting was hung up on
        return callers

    assert meet_among(strangers) < 4


def test_what_follows_a_handshake_without_a_secret_is_bounded_too(meet_among):
    """Words of 200 kB of brackets, from somebody who speaks the handshake."""

    def strangers(port):
        for content in (b"[" * 200_000, b"[" * 60_000, json.dumps({"program": "other"}).encode(), b"[]", b"\xff"):
            (caller,) = call(port)
            wire = Connection(caller, session=greet_leader(caller, None, time.monotonic() + 10))
            wire.send(SAID, content)
            with pytest.raises(OSError, match=r"closed|reset"):
                wire.receive(20)
            wire.close()
        return []

    meet_among(strangers, None)


@pytest.mark.parametrize(
    ("secret", "said", "noted"),
    [
        ("another secret of a host", "it has another secret", "it has another secret"),
        (None, "it has a secret, and this host has none", "it has no secret"),
    ],
)
def test_another_secret_is_one_line_on_both_sides(secret, said, noted, caplog):
    port = free_port()
    with caplog.at_level(logging.WARNING, "torchax_serve"):
        leader, follower = met(hosts_of(port, 0, join_timeout_s=2), hosts_of(port, 1, secret=secret))
    assert str(follower) == (
        f"expected host 0 at 127.0.0.1:{port} to have the secret of this host, got: {said}; give all hosts the same "
        "secret (--hosts-secret-file)"
    )
    assert "host 1 did not come (1 calls with another secret were turned away)" in str(leader)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"a host at 127.0.0.1 was turned away: {noted}; give all hosts the same secret"


def test_a_host_that_goes_while_others_are_awaited_is_named(monkeypatch):
    port, say = free_port(), Connection.send_status

    def unheard(wire, **said):
        if "go" in said:
            raise ConnectionResetError(104, "Connection reset by peer")
        say(wire, **said)

    monkeypatch.setattr(Connection, "send_status", unheard)
    leader, follower = met(hosts_of(port, 0), hosts_of(port, 1))
    assert str(leader).startswith("host 1 is gone (")
    assert str(leader).endswith("; start all hosts again")
    assert "host 0 could not gather all hosts" in str(follower)


def test_leader_without_the_secret_is_refused():
    follower, leader, *sockets = greeted(SECRET.encode(), None)
    assert [str(follower), str(leader)] == ["it has no secret", "it has a secret, and this host has none"]
    for each in sockets:
        each.close()


def test_replayed_handshake_is_refused():
    """A stranger repeats byte for byte what a follower has sent, and what the leader has answered."""
    follower, leader = pair()
    recorded = {"follower": b"", "leader": b""}

    def spied(sock, name):
        class Spy:
            def sendall(self, content):
                recorded[name] += content
                sock.sendall(content)

            def __getattr__(self, attribute):
                return getattr(sock, attribute)

        return Spy()

    deadline = time.monotonic() + 10
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(greet_follower, spied(leader, "leader"), SECRET.encode(), deadline)
        greet_leader(spied(follower, "follower"), SECRET.encode(), deadline)
        other.result()
    for each in (follower, leader):
        each.close()
    assert [len(each) for each in recorded.values()] == [GREETING_BYTES + 32, GREETING_BYTES + 33]

    stranger, leader = pair()
    stranger.sendall(recorded["follower"])
    with pytest.raises(SecretError, match="another secret"):
        greet_follower(leader, SECRET.encode(), time.monotonic() + 10)
    follower, other = pair()
    other.sendall(recorded["leader"])
    with pytest.raises(SecretError, match="has not shown the secret"):
        greet_leader(follower, SECRET.encode(), time.monotonic() + 10)
    for each in (stranger, leader, follower, other):
        each.close()


def test_a_proof_sent_back_to_its_maker_is_refused():
    follower, stranger = pair()

    def echo():
        greeting = stranger.recv(GREETING_BYTES, socket.MSG_WAITALL)
        stranger.sendall(greeting)
        stranger.sendall(b"y" + stranger.recv(32, socket.MSG_WAITALL))

    echoing = threading.Thread(target=echo)
    echoing.start()
    with pytest.raises(SecretError, match="has not shown the secret"):
        greet_leader(follower, SECRET.encode(), time.monotonic() + 10)
    echoing.join()
    stranger.close()
    follower.close()


def test_a_greeting_has_a_deadline_however_slowly_bytes_come():
    stranger, leader = pair()
    stop = threading.Event()

    def drip():
        while not stop.wait(0.05):
            stranger.sendall(MAGIC[:1])

    dripping = threading.Thread(target=drip)
    dripping.start()
    begin = time.monotonic()
    with pytest.raises(NotAHostError, match="in time"):
        greet_follower(leader, None, time.monotonic() + 0.5)
    assert time.monotonic() - begin < 2
    stop.set()
    dripping.join()
    stranger.close()
    leader.close()


@pytest.fixture
def wires():
    """A follower's and a leader's end behind a handshake, with their sockets."""
    one, other, follower, leader = greeted(SECRET.encode(), SECRET.encode())
    made = Connection(follower, accepts_commands=True, session=one), Connection(leader, session=other)
    yield *made, follower, leader
    for wire in made:
        wire.close()


def test_frames_pass_in_order_both_ways(wires):
    follower, leader, *_ = wires
    for number in range(3):
        leader.send_command([number, "x"])
        follower.send_status(number=number)
    assert [leader.receive(5)[1]["number"] for _ in range(3)] == [0, 1, 2]
    assert [follower.receive(5)[0] for _ in range(3)] == [ORDER] * 3


def test_a_frame_that_is_put_in_or_changed_or_repeated_is_refused(wires):
    follower, leader, follower_socket, leader_socket = wires
    leader.send_command("the real one")
    whole = follower_socket.recv(1 << 16)
    for content in (
        HEAD.pack(ORDER, 4) + b"fake" + bytes(32),
        whole[: HEAD.size] + b"\x01" + whole[HEAD.size + 1 :],
        whole,  # counted already: its number is not the next one's
    ):
        with pytest.raises(OSError, match="not of the host that has joined"):
            leader_socket.sendall(content)
            follower.receive(5)
            leader_socket.sendall(content)
            follower.receive(5)


@pytest.mark.parametrize(("secret", "got"), [("short", "5"), (b"x" * 15, "15"), (7, "int"), ("", "0"), ("é" * 7, "14")])
def test_invalid_secrets(secret, got):
    with pytest.raises(InvalidArgumentError, match=f"secret: expected 16 bytes or more, got {got}; make one: openssl"):
        hosts_of(8476, 0, secret=secret)


def test_a_secret_is_not_shown():
    assert SECRET not in repr(hosts_of(8476, 0))


def test_the_command_line_reads_a_secret_from_a_file_or_a_variable(tmp_path, monkeypatch):
    given = {"coordinator": "127.0.0.1:8476", "num_hosts": 2, "host_id": 0}
    monkeypatch.delenv("TORCHAX_SERVE_HOSTS_SECRET", raising=False)
    assert DeviceOptions(**given).hosts().secret is None
    monkeypatch.setenv("TORCHAX_SERVE_HOSTS_SECRET", SECRET)
    assert DeviceOptions(**given).hosts().secret == SECRET
    (tmp_path / "secret").write_text(f"{SECRET[::-1]}\n")
    assert DeviceOptions(**given, hosts_secret_file=tmp_path / "secret").hosts().secret == SECRET[::-1]
    with pytest.raises(InvalidArgumentError, match=r"--hosts-secret-file: expected a file of text, got .*absent"):
        DeviceOptions(**given, hosts_secret_file=tmp_path / "absent").hosts()


def test_public_address_without_a_secret_warns(caplog, monkeypatch):
    monkeypatch.setattr("torchax_serve.distributed.hosts.rendezvous._gather", lambda *args: [])
    for host, secret in (("127.0.0.1", None), ("10.0.0.1", SECRET), ("10.0.0.1", None)):
        hosts = Hosts(coordinator=f"{host}:8476", num_hosts=2, host_id=0, secret=secret)
        monkeypatch.setattr(
            "torchax_serve.distributed.hosts.rendezvous._resolved", lambda hosts: (socket.AF_INET, hosts.address[0])
        )
        with caplog.at_level(logging.WARNING, "torchax_serve"):
            rendezvous(hosts, ASKED)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("hosts: no secret is given, so whoever reaches 10.0.0.1:8476 can join")
