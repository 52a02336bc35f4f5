"""Hosts that meet: all in one process, on threads, without `jax.distributed`."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from ports import free_port

from model_adapters.errors import HostsError, InvalidArgumentError
from torchax_serve import Hosts, follow, serve
from torchax_serve.distributed.hosts import heartbeat as watching
from torchax_serve.distributed.hosts.connection import Connection
from torchax_serve.distributed.hosts.heartbeat import Heartbeat
from torchax_serve.distributed.hosts.rendezvous import rendezvous

ASKED = {"model": "tiny", "dtype": "auto"}


@pytest.fixture(autouse=True)
def initialized(monkeypatch):
    """The calls of `jax.distributed.initialize`, which does nothing here."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append(args))
    return calls


def hosts_of(port, host_id, num_hosts=2, join_timeout_s=20, host="127.0.0.1"):
    return Hosts(coordinator=f"{host}:{port}", num_hosts=num_hosts, host_id=host_id, join_timeout_s=join_timeout_s)


def met(*calls):
    """What each of several calls of `join` answers or raises, side by side."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(rendezvous, *call) for call in calls]
        results = [future.exception() or future.result() for future in futures]
    watches = [watch for result in results if isinstance(result, list) for watch in result]
    for watch in watches:
        watch.stop()
    for watch in watches:
        watch.close()
    return results


def test_all_hosts_meet_and_then_jax_begins(initialized):
    port = free_port()
    leader, first, second = met(*((hosts_of(port, n, 3), ASKED) for n in range(3)))
    assert [watch.who for watch in leader] == ["host 1", "host 2"]
    assert [watch.who for watch in first + second] == [f"host 0 at 127.0.0.1:{port}"] * 2
    assert sorted(initialized) == [(f"127.0.0.1:{port + 1}", 3, n) for n in range(3)]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({**ASKED, "dtype": "float32"}, "dtype float32, host 0 has auto"),
        ({"dtype": "auto"}, "model unknown, host 0 has tiny"),
        ({**ASKED, "jax": "0.1"}, "jax 0.1, host 0 has "),
        ({**ASKED, "source code": "abc"}, "source code abc, host 0 has "),
    ],
)
def test_error_names_the_difference_between_hosts(other, said, initialized):
    port = free_port()
    leader, follower = met((hosts_of(port, 0), ASKED), (hosts_of(port, 1), other))
    for error in (leader, follower):
        assert isinstance(error, HostsError)
        assert said in str(error)
    assert not initialized


def test_two_hosts_of_one_number():
    port = free_port()
    results = met(*((hosts_of(port, n, 3), ASKED) for n in (0, 1, 1)))
    assert all(isinstance(error, HostsError) for error in results)
    assert "the number 1, which is another host's" in str(results[0])


def test_a_host_that_never_comes():
    (error,) = met((hosts_of(free_port(), 0, 3, 0.5), ASKED))
    assert str(error).startswith(
        "expected 2 more hosts within 0.5 s, host 1, 2 did not come; start it with --host-id 1"
    )


def test_a_leader_that_never_comes():
    (error,) = met((hosts_of(free_port(), 1, join_timeout_s=0.5), ASKED))
    assert "expected host 0 at 127.0.0.1:" in str(error)
    assert "within 0.5 s, got " in str(error)


def test_two_leaders():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        (error,) = met((hosts_of(port, 0), ASKED))
    assert "got a port that is taken; another host 0 is running there" in str(error)
    # An address of a block that is kept for documents: nobody's.
    (error,) = met((hosts_of(port, 0, host="192.0.2.7"), ASKED))
    assert "got an address that is not this machine's; there is one leader" in str(error)


def connection():
    """Both ends of a connection of TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def test_leader_refuses_commands():
    ours, theirs = connection()
    with ours, theirs:
        Connection(ours).send_command("anything that would be unpickled")
        with pytest.raises(OSError, match="not of this program"):
            Connection(theirs).receive(5)


@pytest.fixture
def watched(monkeypatch):
    """A watch, the other end of its connection, and what it reports."""
    monkeypatch.setattr(watching, "BEAT_S", 0.1)
    ours, theirs = connection()
    reports, came = [], threading.Event()

    def report(message):
        reports.append(message)
        came.set()

    watch = Heartbeat(Connection(ours), "host 1", "start again", report)
    with theirs:
        yield watch, Connection(theirs), lambda wait_s=20: came.wait(wait_s) and reports
    watch.close()


def test_a_closed_connection_is_a_loss(watched):
    watch, other, reports = watched
    other.send_status(loaded={"x": "1"})
    assert watch.incoming.get(timeout=20) == {"loaded": {"x": "1"}}
    other.close()
    assert reports() == ["host 1 is gone (the connection was closed); start again"]


def test_silence_is_a_loss_and_a_beat_is_none(watched):
    _, other, reports = watched
    for _ in range(20):
        other.send(b"b")
        threading.Event().wait(0.1)
    assert not reports(wait_s=0)
    assert reports() == ["host 1 has not been heard of for 1 s; start again"]


def test_follower_error_reaches_the_leader(watched):
    _, other, reports = watched
    other.send_status(failed="no memory")
    assert reports() == ["host 1 has failed: no memory; start again"]


def test_the_end_is_no_loss(watched):
    watch, other, reports = watched
    watch.stop()
    watch.host_lost("is gone")
    other.close()
    assert not reports(wait_s=0.1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"coordinator": "nowhere"}, r"coordinator: expected HOST:PORT .* got 'nowhere'"),
        ({"coordinator": "a:99999"}, r"coordinator: expected HOST:PORT .* got 'a:99999'"),
        ({"num_hosts": 1}, r"num_hosts: expected a whole number >= 2, got 1"),
        ({"host_id": 2}, r"host_id: expected a whole number from 0 to 1, got 2"),
        ({"join_timeout_s": 0}, r"join_timeout_s: expected a number of seconds > 0, got 0"),
    ],
)
def test_bad_numbers_and_addresses(given, said):
    with pytest.raises(InvalidArgumentError, match=said):
        Hosts(**{"coordinator": "127.0.0.1:8476", "num_hosts": 2, "host_id": 0, **given})


def test_leader_and_followers_by_host_id():
    with pytest.raises(InvalidArgumentError, match=r"got 1; call follow\(\) on the other hosts"):
        serve(hosts=hosts_of(8476, 1))
    with pytest.raises(InvalidArgumentError, match=r"got 0, the leader's; call serve\(\)"):
        follow(hosts=hosts_of(8476, 0))
