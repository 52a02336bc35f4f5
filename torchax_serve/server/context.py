"""What the parts of a running server share."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from model_adapters.errors import UnsupportedArgumentError
from torchax_serve import __version__
from torchax_serve.server.answers import Answer
from torchax_serve.server.auth import ApiKeys
from torchax_serve.server.errors import ApiError, api_error_of
from torchax_serve.server.key_limits import KeyUsages
from torchax_serve.server.loop_lag import LoopLag
from torchax_serve.server.metrics import Metrics
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.profiler import Profiler
from torchax_serve.server.response_families import chosen_template
from torchax_serve.server.responses.store import ResponseStore
from torchax_serve.server.schemas import TextRequest
from torchax_serve.server.start_progress import StartProgress

if TYPE_CHECKING:
    from torchax_serve.server.tracing import Tracing


class Stage(enum.Enum):
    """How far the server is."""

    LOADING = "loading the model"
    WARMING_UP = "warming up"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"  # the engine does not move, or has ended


class ServerContext:
    """State of a server: its options, its model, and the requests that run.

    Attributes:
        stage: How far it is.
        start: How far its start is, in numbers.
        loop_lag: How late the event loop is.
        num_in_flight: Requests that are being answered, apart from those of health and metrics.
        fingerprint: ``system_fingerprint`` of answers: equal for equal versions and models.
        tracing: Spans of requests; None without a collector.
        responses: Responses that later requests may name.
        profiler: Profiles of the process; None without a folder for them.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.keys = ApiKeys(options.api_keys, options.api_key_file)
        self.key_usages = KeyUsages()
        self.metrics = Metrics(options.metrics_compat, lambda: options.metrics_without_key and self.keys.limits_models)
        self.loop_lag = LoopLag()
        self.responses = ResponseStore(options.max_stored_responses, options.stored_response_ttl_s)
        self.stage, self.start = Stage.LOADING, StartProgress()
        self.refuses_new = False  # after the time in which a draining server still accepts
        self.num_in_flight = 0
        self.started_s = time.time()
        self.fingerprint = "fp_" + hashlib.sha256(__version__.encode()).hexdigest()[:10]
        self.tracing = _tracing(options.otlp_traces_endpoint)
        self.profiler = None if options.profile_dir is None else Profiler(options.profile_dir)
        if options.response_template is not None:
            chosen_template(options.response_template)  # one that does not exist is an error at once
        self._service: ModelService | None = None

    def set_service(self, service: ModelService) -> None:
        """Sets the model, from which on requests are answered."""
        self._service = service
        digest = hashlib.sha256(f"{__version__} {service.name} {service.model.dtype_name}".encode())
        self.fingerprint = f"fp_{digest.hexdigest()[:10]}"
        self.metrics.watch(service)

    @property
    def loaded(self) -> ModelService | None:
        """The model; None while it is loaded."""
        return self._service

    def error_of(self, error: BaseException) -> ApiError:
        """Returns the answer to an error; it shows no path of the model."""
        answer, service = api_error_of(error), self._service
        if service is not None and service.root != (folder := service.model.name):
            answer.message = answer.message.replace(folder, service.name)
        return answer

    def service(self) -> ModelService:
        """Returns the model.

        Raises:
            ApiError: 503 while there is none, and when no more requests are taken.
        """
        if self.refuses_new:
            headers = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(503, "the server is shutting down; send the request to another one", headers=headers)
        if self._service is None or self.stage in (Stage.LOADING, Stage.WARMING_UP):
            raise ApiError(503, f"the server is {self.stage.value}; send the request again later")
        if self.stage is Stage.DEAD:
            raise ApiError(503, "the model's engine has ended; send the request to another server")
        return self._service


def context_of(request: Request) -> ServerContext:
    """Returns the state of the server that answers `request`."""
    found: ServerContext = request.scope["app"].context
    return found


def follow(request: Request, body: TextRequest, answers: Sequence[Answer]) -> None:
    """Has the limits of a request's key and its span follow its answers."""
    if request.state.usage is not None:
        request.state.usage.follow(answers)
    if request.state.span is not None:
        request.state.span.follow(body, answers)


def _tracing(endpoint: str | None) -> Tracing | None:
    if endpoint is None:
        return None
    try:
        from torchax_serve.server.tracing import Tracing

        return Tracing.to_collector(endpoint)
    except ImportError as error:
        raise UnsupportedArgumentError(
            f"otlp_traces_endpoint: expected the packages of OpenTelemetry, found no {error.name}; "
            "pip install 'torchax-serve[otel]'"
        ) from error
