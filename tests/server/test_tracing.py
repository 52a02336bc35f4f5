"""Spans of requests, as a collector of OpenTelemetry on this machine gets them."""

import gzip
import http.server
import json
import subprocess
import sys
import threading
import time

import httpx
import pytest
from ports import free_port

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.server import answers
from torchax_serve.server.context import ServerContext
from torchax_serve.server.options import ServerOptions

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the packages of the extra otel")
messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

SECRET = "secret-words-of-the-prompt"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": "tiny", "prompt": f"Hi {SECRET}", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "seed": 3}


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received = b""
        self.exports = []
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans(self):
        return [
            span
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        assert self.path == "/v1/traces"
        self.server.received += data
        self.server.exports.append(messages.ExportTraceServiceRequest.FromString(data))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def collector():
    with Collector() as found:
        yield found
        found.shutdown()


@pytest.fixture
def traced(start_server, collector):
    return start_server(otlp_traces_endpoint=collector.url)


def value_of(any_value):
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in any_value.array_value.values]
    return getattr(any_value, kind)


def attributes_of(span):
    return {each.key: value_of(each.value) for each in span.attributes}


def spans_of(server, collector, num_spans):
    """The spans that have been sent; a span ends behind the last byte of its answer."""
    for _ in range(200):
        server.context.tracing.flush()
        if len(collector.spans()) >= num_spans:
            break
        threading.Event().wait(0.02)
    return collector.spans()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_of_the_clients_trace(traced, collector, stream, monkeypatch):
    decoder = answers.answer_detokenizer
    # The engine may begin with a request before the server has what it needs to read it.
    monkeypatch.setattr(answers, "answer_detokenizer", lambda *args: time.sleep(0.05) or decoder(*args))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "X-Request-Id": "my-id"}
    with httpx.Client(base_url=traced.url, timeout=60, headers=headers) as http:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = http.post("/v1/completions", json={**BODY, "stream": stream, **options})
    assert answer.status_code == 200
    usage = json.loads(answer.text.split("data: ")[-2]) if stream else answer.json()
    (span,) = spans_of(traced, collector, 1)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=1")
    assert (span.name, span.kind) == ("text_completion tiny", span.SPAN_KIND_SERVER)
    found = attributes_of(span)
    assert found["http.route"] == "/v1/completions"
    assert found["http.response.status_code"] == 200
    assert found["gen_ai.request.id"] == "my-id"
    assert found["gen_ai.request.temperature"] == 0.5
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.seed"]) == (5, 3)
    assert found["gen_ai.usage.input_tokens"] == usage["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["usage"]["completion_tokens"] == 5
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"]
    assert found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert found["gen_ai.latency.e2e"] <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    (resource,) = (each.resource for each in collector.exports[0].resource_spans)
    assert attributes_of(resource)["service.name"] == "torchax-serve"


def test_spans_of_errors_and_of_clients_that_leave(traced, collector):
    with httpx.Client(base_url=traced.url, timeout=60) as http:
        assert http.post("/v1/completions", json={**BODY, "model": SECRET}).status_code == 404
        assert http.post(f"/{SECRET}").status_code == 404
        assert http.get("/v1/models").status_code == 200  # no span: it asks for no work
        with http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 400, "stream": True}) as stream:
            next(stream.iter_lines())
    unknown, other, left = spans_of(traced, collector, 3)
    assert attributes_of(unknown)["error.type"] == "model_not_found"
    assert (attributes_of(other)["http.route"], other.name) == ("other", "POST other")
    assert attributes_of(other)["error.type"] == "unknown_url"
    assert attributes_of(left)["gen_ai.response.finish_reasons"] == ["abort"]
    assert SECRET.encode() not in collector.received and b"127.0.0.1" not in collector.received


@pytest.mark.parametrize("parent", ["", "00-zz-1-01", "x" * 4000, f"00-{'0' * 32}-{PARENT}-01", "00-" * 300])
def test_a_traceparent_that_is_none_begins_a_new_trace(traced, collector, parent):
    with httpx.Client(base_url=traced.url, timeout=60) as http:
        assert http.post("/v1/completions", json=BODY, headers={"traceparent": parent}).status_code == 200
    (span,) = spans_of(traced, collector, 1)
    assert span.trace_id.hex() != TRACE and not span.parent_span_id


def test_a_collector_that_is_not_there_stops_nothing(start_server):
    traced = start_server(otlp_traces_endpoint=f"http://127.0.0.1:{free_port()}/v1/traces")
    with httpx.Client(base_url=traced.url, timeout=60) as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200
    assert traced.stop() == 0


def test_nothing_is_imported_without_an_endpoint():
    code = """
import sys
from torchax_serve.server import answers
from torchax_serve.server.context import ServerContext
from torchax_serve.server.options import ServerOptions
before = {name for name in sys.modules if name.startswith("opentelemetry")}
assert ServerContext(ServerOptions()).tracing is None
assert {name for name in sys.modules if name.startswith("opentelemetry")} == before
assert "torchax_serve.server.tracing" not in sys.modules and "opentelemetry.exporter" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "endpoint", ["", "127.0.0.1:4318", "ftp://host/v1/traces", "http://user:password@host/", "http://ho st/"]
)
def test_endpoints_that_are_none(endpoint):
    with pytest.raises(InvalidArgumentError, match="otlp_traces_endpoint: expected a URL") as caught:
        ServerOptions(otlp_traces_endpoint=endpoint)
    assert "password@" not in str(caught.value)


def test_a_protocol_or_package_that_is_missing_is_named(monkeypatch):
    options = ServerOptions(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(InvalidArgumentError, match="expected http/protobuf or grpc, got 'http/json'"):
        ServerContext(options)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(UnsupportedArgumentError, match=r"pip install 'torchax-serve\[otel\]'"):
        ServerContext(options)
