"""Spans of requests for OpenTelemetry.

This module is imported only where a collector of traces is named.

Attributes are those of OpenTelemetry's conventions for HTTP and generative AI, and vLLM's for latencies. None has
text of a request, a path, a key or an address.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from model_adapters.errors import InvalidArgumentError
from torchax_serve import __version__

if TYPE_CHECKING:
    from torchax_serve.server.answers import Answer

CLOSE_S = 5.0
"""Seconds for which the end of the server waits for the last spans to be sent."""
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_FIELDS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "n": "choice.count",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
"""Fields of a request and the attributes ``gen_ai.request.*`` that have their values."""


class Tracing:
    """Makes a span of each request and sends them to a collector, in a thread of its own.

    Spans that a slow collector has no time for are dropped. Sampling, resources, headers and the sizes of batches
    follow OpenTelemetry's variables (``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME`` ...).

    Args:
        exporter: What sends spans.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "torchax-serve"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("torchax_serve", __version__)
        self._contexts = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, endpoint: str) -> Tracing:
        """Returns spans that are sent by OTLP.

        They go over HTTP or, if OpenTelemetry's variables say so, gRPC.

        Args:
            endpoint: URL of the collector, with its path.

        Raises:
            ImportError: The exporter's package is missing.
            InvalidArgumentError: The protocol in the environment is unknown.
        """
        protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

            return cls(over_http.OTLPSpanExporter(endpoint=endpoint))
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

            return cls(over_grpc.OTLPSpanExporter(endpoint=endpoint))
        raise InvalidArgumentError(f"{_PROTOCOLS[0]}: expected http/protobuf or grpc, got {protocol!r}")

    def begin(self, route: str, request_id: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpan:
        """Returns the span of a request that begins.

        It continues the client's trace, if its headers name one.
        """
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _CONTEXT_HEADERS}
        attributes = {"http.request.method": "POST", "http.route": route, "gen_ai.request.id": request_id}
        if (operation := _OPERATIONS.get(route)) is not None:
            attributes["gen_ai.operation.name"] = operation
        span = self._tracer.start_span(
            f"POST {route}", context=self._contexts.extract(carrier), kind=SpanKind.SERVER, attributes=attributes
        )
        return RequestSpan(span, operation)

    def flush(self) -> None:
        """Sends the spans that have ended."""
        self._provider.force_flush()

    def close(self) -> None:
        """Sends the spans that have ended, for at most `CLOSE_S` seconds."""
        thread = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


class RequestSpan:
    """The span of one request.

    Args:
        span: OpenTelemetry's.
        operation: What the request asks for, as the conventions name it; None for what they do not name.
    """

    def __init__(self, span: Any, operation: str | None) -> None:
        self._span, self._operation = span, operation
        self._answers: Sequence[Answer] = ()

    def follow(self, body: Any, answers: Sequence[Answer]) -> None:
        """Records the fields of a valid request and, at its end, what its answers took."""
        self._answers = answers
        self._span.update_name(f"{self._operation} {body.model}")
        found = {"gen_ai.request.model": body.model, "gen_ai.response.model": body.model}
        for field, name in _FIELDS.items():
            if (value := getattr(body, field, None)) is not None:
                found[f"gen_ai.request.{name}"] = value
        self._span.set_attributes(found)

    def end(self, status: int, error: str | None) -> None:
        """Ends the span.

        Args:
            status: HTTP status of the answer.
            error: Type of the error that the client got, perhaps in a stream; None for none.
        """
        attributes = {"http.response.status_code": status, **self._of_answers()}
        if error is not None:
            attributes["error.type"] = error
            if not 400 <= status < 500:
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.set_attributes(attributes)
        self._span.end()

    def _of_answers(self) -> dict[str, Any]:
        """Returns tokens, reasons and seconds of the answers.

        Those of several span from the first to the last.
        """
        answers = self._answers
        if not answers:
            return {}
        prompts = {id(answer.prompt_ids): answer for answer in reversed(answers)}.values()
        found: dict[str, Any] = {
            "gen_ai.usage.input_tokens": sum(len(answer.prompt_ids) for answer in prompts),
            "gen_ai.usage.output_tokens": sum(answer.num_tokens for answer in answers),
            "gen_ai.usage.cache_read.input_tokens": sum(answer.num_cached_tokens for answer in prompts),
            "gen_ai.response.finish_reasons": [answer.finish_reason or "abort" for answer in answers],
        }
        began = min(answer.submitted_s for answer in answers)
        started = min((each.started_s for each in answers if each.started_s is not None), default=None)
        first = min((each.first_s for each in answers if each.first_s is not None), default=None)
        last = max((each.last_s for each in answers if each.last_s is not None), default=None)
        if started is not None:
            found["gen_ai.latency.time_in_queue"] = started - began
        if first is not None and last is not None:
            found["gen_ai.latency.time_to_first_token"] = first - began
            found["gen_ai.latency.e2e"] = last - began
            found["gen_ai.latency.time_in_model_decode"] = last - first
            if started is not None:
                found["gen_ai.latency.time_in_model_prefill"] = first - started
        return found
