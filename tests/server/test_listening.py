"""TLS with certificates that are replaced, Unix sockets, and systemd's notifications."""

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import time

import httpx
import pytest

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server import listening
from torchax_serve.server.context import ServerContext
from torchax_serve.server.lifespan import TICK_S, notify_systemd
from torchax_serve.server.listening import open_sockets
from torchax_serve.server.options import ServerOptions


def certificate(folder, name):
    """A certificate for 127.0.0.1 signed by itself; paths of it and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def name_of_server(address):
    """The name in the certificate that a server shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address, timeout=10) as plain, context.wrap_socket(plain) as secure:
        data = secure.getpeercert(binary_form=True)
    return ssl.DER_cert_to_PEM_cert(data)


def test_certificates_are_replaced_while_a_stream_goes_on(start_server, tmp_path):
    cert, key = certificate(tmp_path, "first")
    second = certificate(tmp_path, "second")
    secure = start_server(tls_certificate=cert, tls_key=key)
    assert secure.url.startswith("https://")
    first = name_of_server(secure.address)
    context = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(base_url=secure.url, verify=context) as http:
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            cert.write_bytes(second[0].read_bytes())
            key.write_bytes(second[1].read_bytes())
            until = 100
            while name_of_server(secure.address) == first and until:
                until -= 1
            assert list(lines)[-2] == "data: [DONE]"
    end = time.monotonic() + 5
    while name_of_server(secure.address) == first:
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("num_rounds", range(4))
def test_a_connection_that_comes_with_a_new_certificate_is_answered(num_rounds, tmp_path):
    """`num_rounds` of the event loop lie between the connection and the replacement."""
    cert, key = certificate(tmp_path, "server")

    async def shake_hands():
        listener = listening.HttpListener(None, ServerOptions(port=0, tls_certificate=cert, tls_key=key))
        await listener.start()
        (address,) = listener.addresses
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
            for _ in range(num_rounds):
                await asyncio.sleep(0)
            await listener.start()
            context = ssl.create_default_context(cafile=str(cert))
            client.settimeout(5)
            secure = await asyncio.to_thread(context.wrap_socket, client, server_hostname="127.0.0.1")
            secure.close()
        listener.close()

    asyncio.run(shake_hands())


def test_clients_need_a_certificate_if_it_is_asked_for(start_server, tmp_path):
    cert, key = certificate(tmp_path, "server")
    theirs, their_key = certificate(tmp_path, "client")
    secure = start_server(tls_certificate=cert, tls_key=key, tls_client_ca=theirs)
    context = ssl.create_default_context(cafile=str(cert))
    with pytest.raises(httpx.HTTPError), httpx.Client(verify=context) as http:
        http.get(f"{secure.url}/livez")
    context.load_cert_chain(theirs, their_key)
    with httpx.Client(verify=context) as http:
        assert http.get(f"{secure.url}/livez").status_code == 200


def shakes_hands(address, context, session=None):
    """Whether the server accepts a client; gives it a ticket for its next connection, if one is given."""
    with socket.create_connection(address, timeout=10) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secure:
                secure.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                found = secure.recv(1 << 16).startswith(b"HTTP/1.1 200")
                return secure.session if found else None
        except (ssl.SSLError, ConnectionError):
            return None


def test_the_ca_of_clients_is_replaced_while_a_connection_goes_on(start_server, tmp_path):
    cert, key = certificate(tmp_path, "server")
    names = ("before", "after")
    pairs = [certificate(tmp_path, name) for name in names]
    authority = tmp_path / "authority.pem"
    authority.write_bytes(pairs[0][0].read_bytes())
    secure = start_server(tls_certificate=cert, tls_key=key, tls_client_ca=authority)
    before, after = (ssl.create_default_context(cafile=str(cert)) for _ in names)
    before.load_cert_chain(*pairs[0])
    after.load_cert_chain(*pairs[1])
    ticket = shakes_hands(secure.address, before)
    assert ticket is not None and shakes_hands(secure.address, after) is None
    with httpx.Client(base_url=secure.url, verify=before) as http:
        assert http.get("/livez").status_code == 200
        authority.write_text("no certificate")
        time.sleep(3 * TICK_S)
        assert shakes_hands(secure.address, before) is not None  # what does not fit changes nothing
        authority.write_bytes(pairs[1][0].read_bytes())
        end = time.monotonic() + 20
        while shakes_hands(secure.address, after) is None:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert shakes_hands(secure.address, before) is None
        assert shakes_hands(secure.address, before, ticket) is None  # nor by what the server gave it before
        assert http.get("/livez").status_code == 200  # on the open connection


def test_a_unix_socket(tmp_path):
    path = tmp_path / "socket"
    (first,) = open_sockets(ServerOptions(uds=path))
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidArgumentError, match="another process"):
        open_sockets(ServerOptions(uds=path))
    first.close()  # as after SIGKILL: the file stays
    (second,) = open_sockets(ServerOptions(uds=path))
    second.close()


def test_a_name_without_a_character_is_refused():
    with pytest.raises(InvalidArgumentError, match="served_model_names: expected names of at least one character"):
        ServerOptions(served_model_names=("a", ""))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile_dir": "file"}, "profile_dir: expected a folder for new files, got .*file"),
        ({"profile_dir": "file/folder"}, "profile_dir: expected a folder for new files"),
        ({"response_template": "qwen9"}, "response_template: expected .*gpt-oss, .*, none or a file .*, got qwen9"),
        ({"response_template": "file"}, "response_template: .* got .*file"),
        ({"tls_client_ca": "file"}, "tls_client_ca: expected tls_certificate and tls_key with it"),
        ({"cors_origins": ("example.com",)}, "cors_origins: expected SCHEME://HOST .*, got 'example.com'"),
        ({"cors_origins": ("https://example.com/",)}, "cors_origins: expected"),
        ({"allowed_hosts": ("example.com:8000",)}, "allowed_hosts: expected a host .*, got 'example.com:8000'"),
        ({"allowed_hosts": ("[::1]",)}, "allowed_hosts: expected"),
        ({"media_hosts": ("https://example.com",)}, "media_hosts: expected HOST or HOST:PORT"),
        ({"media_hosts": ("Example.com",)}, "media_hosts: expected"),
    ],
)
def test_what_could_never_work_is_an_error_at_the_start(options, message, tmp_path):
    (tmp_path / "file").write_text("{}")
    paths = ("profile_dir", "tls_client_ca")
    given = {name: tmp_path / value if name in paths else value for name, value in options.items()}
    if options.get("response_template") == "file":
        given["response_template"] = str(tmp_path / "file")
    with pytest.raises(InvalidArgumentError, match=message):
        ServerContext(ServerOptions(**given))


def test_names_of_hosts_that_requests_can_have():
    hosts = ("host.docker.internal", "fd00::1")
    ServerOptions(allowed_hosts=hosts, media_hosts=(*hosts, "10.0.0.1:8080"), cors_origins=("http://localhost:3000",))


def test_a_port_that_is_taken(server):
    with pytest.raises(InvalidArgumentError, match="address to listen on"):
        open_sockets(ServerOptions(port=server.address[1]))


def test_connections_send_each_write_at_once():
    (listening_socket,) = open_sockets(ServerOptions(port=0))
    with (
        listening_socket,
        socket.create_connection(listening_socket.getsockname()),
        listening_socket.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_sockets_of_systemd_come_first(start_server, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as given:
        monkeypatch.setattr(listening, "_SYSTEMD_FIRST_FD", os.dup(given.fileno()))
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        activated = start_server()
        assert activated.address == given.getsockname()
        assert httpx.get(f"{activated.url}/readyz").status_code == 200
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))  # of another process
    (own,) = open_sockets(ServerOptions(port=0))
    assert own.fileno() != listening._SYSTEMD_FIRST_FD
    own.close()


def test_systemd_is_told(tmp_path, monkeypatch):
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        notify_systemd("READY=1")
        assert systemd.recv(100) == b"READY=1"
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify_systemd("READY=1")
    assert os.environ.get("NOTIFY_SOCKET") is None
