"""What the parts of a running server share."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.server.answers import Answer
from torchax_serve.server.auth import ApiKeys
from torchax_serve.server.batch.files import FileLimits, FileStore
from torchax_serve.server.batch.jobs import BatchJobs
from torchax_serve.server.batch.records import open_folder
from torchax_serve.server.errors import ApiError, api_error_of, bad_request
from torchax_serve.server.key_limits import KeyUsages
from torchax_serve.server.loop_lag import LoopLag
from torchax_serve.server.metrics import Metrics
from torchax_serve.server.model_pool import ModelPool, PooledModel
from torchax_serve.server.model_service import ModelService, adapters_of, unknown_model
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.profiler import Profiler
from torchax_serve.server.response_families import chosen_template
from torchax_serve.server.responses.store import ResponseStore
from torchax_serve.server.schemas import TextRequest
from torchax_serve.server.sse import until_disconnect
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
        pool: Several models, of which requests name one; None: a server of one model.
        tracing: Spans of requests; None without a collector.
        jobs: Batches and their files; None without a folder for them.
        responses: Responses that later requests may name.
        profiler: Profiles of the process; None without a folder for them.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.jobs: BatchJobs | None = None
        self._files_lock, secret = None, None
        if options.file_storage_path is not None:
            self._files_lock, secret = open_folder(options.file_storage_path)  # which is held as long as the server is
            self.jobs = _jobs(options.file_storage_path, options)
        self.keys = ApiKeys(options.api_keys, options.api_key_file, secret)
        self.key_usages = KeyUsages()
        self.metrics = Metrics(options.metrics_compat, lambda: options.metrics_without_key and self.keys.limits_models)
        self.loop_lag = LoopLag()
        self.responses = ResponseStore(options.max_stored_responses, options.stored_response_ttl_s)
        self.stage, self.start = Stage.LOADING, StartProgress()
        self.refuses_new = False  # after the time in which a draining server still accepts
        self.num_in_flight = 0
        self.started_s = time.time()
        self.tracing = _tracing(options.otlp_traces_endpoint)
        self.profiler = None if options.profile_dir is None else Profiler(options.profile_dir)
        if options.response_template is not None:
            chosen_template(options.response_template)  # one that does not exist is an error at once
        self.pool: ModelPool | None = None
        self._service: ModelService | None = None

    def close_files(self) -> None:
        """Lets another server have the folder of files."""
        if self._files_lock is not None:
            self._files_lock.close()

    def set_service(self, service: ModelService) -> None:
        """Sets the model, from which on requests are answered."""
        self._service = service
        self.metrics.watch(lambda: self.loaded)

    def set_pool(self, pool: ModelPool) -> None:
        """Sets the models of a server of several, from which on requests are answered."""
        self.pool, self.stage = pool, Stage.READY
        self.metrics.watch(lambda: self.loaded, has_several=True)

    @property
    def loaded(self) -> list[ModelService]:
        """The models that are loaded, without those that are being unloaded: their engines end."""
        if self.pool is not None:
            return [each.service for each in self.pool.models if each.service is not None and not each.is_closing]
        return [] if self._service is None else [self._service]

    @property
    def model_names(self) -> list[str]:
        """Names of models, without those of adapters; empty while the only model is loaded."""
        if self.pool is not None:
            return [name for each in self.pool.models for name in each.spec.names]
        return [] if self._service is None else list(self._service.names)

    @property
    def every_name(self) -> list[str]:
        """Names of models and of their adapters."""
        if self.pool is not None:
            return [name for each in self.pool.models for name in (*each.spec.names, *each.spec.adapters)]
        return [name for each in self.loaded for name in (*each.names, *adapters_of(each))]

    def error_of(self, error: BaseException) -> ApiError:
        """Returns the answer to an error; it shows no path of the model."""
        answer = api_error_of(error)
        for service in self.loaded:
            if service.root != (folder := service.model.name):
                answer.message = answer.message.replace(folder, service.name)
        return answer

    def only_service(self) -> ModelService | None:
        """Returns the model of a server of one; None if it has several.

        Raises:
            ApiError: As `service`.
        """
        if self.pool is None:
            return self.service()
        self.refuse_late()
        return None

    async def take(self, request: Request, name: str) -> ModelService:
        """Returns the model of several that a request names, loaded; its end lets it go.

        Raises:
            ApiError: 400 without a name, 404 if there is no such model for the request's key, 503 if it cannot be
                loaded.
            ClientDisconnect: The client has gone.
        """
        assert self.pool is not None
        model = self.find(request, name)
        service = await until_disconnect(request.receive, self.pool.take(model))
        request.scope["state"]["model"] = model  # `_Exchange` lets it go
        return service

    def find(self, request: Request, name: str) -> PooledModel:
        """Returns the model of several that a request names; raises ApiError as `take`."""
        assert self.pool is not None
        key = request.state.key
        allowed = [each for each in self.every_name if key is None or key.allows(each)]
        if not name:
            raise bad_request(f"model: expected one of {', '.join(allowed)}, got none", "model", "invalid_value")
        if name not in allowed or (model := self.pool.find(name)) is None:
            raise unknown_model(name)
        return model

    def release(self, model: PooledModel) -> None:
        """Ends the use of a model by a request."""
        assert self.pool is not None
        self.pool.release(model)

    def refuse_late(self) -> None:
        """Raises ApiError, 503, when no more requests are taken."""
        if self.refuses_new:
            headers = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(503, "the server is shutting down; send the request to another one", headers=headers)

    def service(self) -> ModelService:
        """Returns the model.

        Raises:
            ApiError: 503 while there is none, and when no more requests are taken; 400 of a server of several.
        """
        self.refuse_late()
        if self.pool is not None:
            raise ApiError(400, "expected a server of one model, got one of several; start one of that model alone")
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


def _jobs(folder: Path, options: ServerOptions) -> BatchJobs:
    limits = FileLimits(
        max_files=options.max_stored_files,
        max_bytes=options.file_storage_bytes,
        max_file_bytes=options.connection.max_upload_bytes,
        max_age_s=options.stored_file_ttl_s,
    )
    try:
        return BatchJobs(folder / "batches", FileStore(folder / "files", limits))
    except OSError as error:
        raise InvalidArgumentError(
            f"file_storage_path: expected a folder that can be read and written, got {folder} ({error.strerror})"
        ) from error


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
