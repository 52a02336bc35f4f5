"""`RecordedModel`: a served model from a start record, without torch until it is needed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax

from model_adapters.errors import TorchaxServeError
from model_adapters.jax_settings import programs_run
from model_adapters.loading.memory import give_back_freed
from model_adapters.loading.model_source import ModelSource
from model_adapters.ops.compressed_weight import Weight
from model_adapters.ops.cpu.huge_pages import move_into_huge_pages
from torchax_serve.compilation.background import wait_for_work
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.engine.data_parallel import DataParallelEngines
from torchax_serve.engine.engine import Engine
from torchax_serve.engine.factory import build_engine
from torchax_serve.engine.options import EngineOptions
from torchax_serve.engine.request_handle import RequestHandle, TokenStream
from torchax_serve.entrypoints.recorded_parts import RecordedParts
from torchax_serve.outputs import Completion, EngineStats
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.scheduler import Request
from torchax_serve.start.record import StartFolder
from torchax_serve.start.recorded_runtime import RecordedRuntime
from torchax_serve.start.recorded_tokenizer import RecordedTokenizer, TokenizerRecord
from torchax_serve.start.torch_side import (
    ABSENT,
    Deferred,
    GenerationValues,
    RecordedConfig,
    RecordedGenerationConfig,
    TorchSide,
)
from torchax_serve.start.weights_file import mapped
from torchax_serve.text import TextStream, chat, generate_batch, stream
from torchax_serve.text.prompt import TextFacts, tokens_request
from torchax_serve.validation.owner_process import OwnerProcess

if TYPE_CHECKING:
    from torchax_serve.entrypoints.served_model import ServedModel

logger = logging.getLogger("torchax_serve")

POLL_S, BUSY_S = 0.25, 5.0
"""Seconds between two looks at whether the engine is idle, and until it need not be."""
MIN_WORK_S = 3.0
"""Seconds of work after which a program that others stand in for is worth loading torch, which takes as long."""


def recorded_model(
    source: ModelSource,
    folder: StartFolder,
    engine: EngineOptions | None,
    load: Callable[[], ServedModel],
    is_latest: Callable[[], bool],
) -> RecordedModel | None:
    """Returns the model of a start record; None if there is no valid one.

    Args:
        source: The model.
        folder: The record's place.
        engine: Options of the engine.
        load: Loads the model with its torch module.
        is_latest: Returns whether the files are those that would be loaded; called if there is a record of them.
    """
    record = folder.read()
    if record is None or not is_latest():
        return None
    try:
        weights, content = mapped(folder.weights_path, record.model.weights)
    except OSError as error:  # a file that went away meanwhile
        logger.info("a start record is not used: %s", error)
        return None

    def load_again() -> ServedModel:
        if folder.read() is None:
            raise TorchaxServeError(
                f"expected the files of {source.name} as they were when it was loaded, and they have changed since; "
                "call serve() again"
            )
        return load()

    parts = RecordedParts(
        name=source.name,
        record=record.model,
        weights=weights,
        content=content,
        load=load_again,
        executables=lambda load_first: ExecutableCache(folder.programs, record.identity, before_trace=load_first),
    )
    return RecordedModel(parts, engine)


class RecordedModel:
    """A `ServedModel` from a record; the torch module is loaded for what was not recorded.

    Attributes:
        writes_text, transcribes, embeds, embeds_by_files: As of the models that are recorded.
        name: The name by which the model was loaded.
        dtype_name: Name of the weights' dtype, such as ``bfloat16``.
        config, generation_config, load_report: Those of the model; what requests do not read loads the torch module.

    Args:
        parts: What it is made of.
        engine_options: Options of the engine.
    """

    writes_text, transcribes, embeds, embeds_by_files = True, False, True, False

    def __init__(self, parts: RecordedParts, engine_options: EngineOptions | None) -> None:
        record = parts.record
        self.name, self.dtype_name = parts.name, record.described[1]
        self._parts, self._record, self._engine_options = parts, record, engine_options
        self._process = OwnerProcess()
        self._lock = threading.RLock()
        self._engine: Engine | DataParallelEngines | None = None
        self._executables: ExecutableCache | None = None  # of the engine
        self._is_closed = False
        self._side = TorchSide(self._load_torch_side)
        self._weights = parts.weights
        absent = dict.fromkeys(record.config_absent, ABSENT)
        self.config: Any = RecordedConfig(self._side, lambda model: model.config, {**record.config, **absent})
        values = {**record.generation_config, "_defaults": record.generation_defaults}
        self.generation_config: Any = RecordedGenerationConfig(
            self._side, lambda model: model.generation_config, values
        )
        self.load_report: Any = Deferred(
            self._side,
            lambda model: model.load_report,
            {"quantization": record.quantization, "requantized": record.requantized},
        )
        if record.requantized:
            logger.warning("%s: %s", self.name, record.requantized)
        self._tokenizer = None if record.tokenizer is None else _tokenizer(self._side, record.tokenizer)

    def _load_torch_side(self) -> ServedModel:
        """Loads the model with its torch module; its engine and arrays are those that run already.

        Raises:
            TorchaxServeError: the files have changed since.
        """
        if self._is_closed:
            raise _closed_error()
        # transformers replaces its module at the end of its import: names cannot be imported from the one that another
        # thread is importing, such as the one that compiles. This waits for it.
        importlib.import_module("transformers")
        model = self._parts.load()
        from torchax_serve.entrypoints.served_model import continue_with

        continue_with(model, self._weights, self._engine)
        model.recorded_executables = self._executables
        return model

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance sees
        from torchax_serve.entrypoints.served_model import ServedModel

        return ServedModel

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_side" not in vars(self):
            raise AttributeError(f"a ServedModel has no attribute {name}")
        return getattr(self._side.get(), name)

    def __repr__(self) -> str:
        if self._side.loaded is not None:
            return repr(self._side.loaded)
        model_type, dtype = self._record.described
        state = "closed" if self._is_closed else f"on {self.device_description}"
        engine = "" if self._engine is None else f", engine: {self._engine.description}"
        return f"<ServedModel {self.name!r}: {model_type}, {dtype}, {state}{engine}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model's forward, with torch tensors in and out."""
        return self._side.get()(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._side.get().__reduce_ex__(protocol)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends requests on the engine with an error and frees the weights."""
        if not self._process.is_current:
            return
        with self._lock:
            self._is_closed = True
            if self._side.loaded is not None:
                self._side.loaded.close()
            elif self._engine is not None:
                self._engine.close("the model was closed")
            for weights in (self._weights, *(each.weights for each in self._parts.replicas)):
                weights.clear()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None if it came without one."""
        _check_open(self)
        return self._side.loaded.tokenizer if self._side.loaded is not None else self._tokenizer

    @property
    def text_facts(self) -> TextFacts:
        """What requests of text need to know of the model."""
        loaded = self._side.loaded
        return self._text_facts if loaded is None else loaded.text_facts

    @functools.cached_property
    def _text_facts(self) -> TextFacts:
        return TextFacts.of(self.name, self.config)

    def _processor(self) -> None:
        """Returns None: no start of a model with a processor of images or audio is recorded."""

    @property
    def device_description(self) -> str:
        """Kind of the device, such as ``cpu``."""
        return jax.devices()[0].device_kind

    @property
    def engine(self) -> Any:
        """Engine that runs the requests of all threads in one batch; made at its first use."""
        _check_open(self)
        if self._side.loaded is not None:
            return self._side.loaded.engine
        with self._lock:
            if self._engine is None:
                executables = self._parts.executables(functools.partial(before_trace, self._side))
                self._executables = executables
                runtimes = [self._runtime(self._weights, executables, self._parts.sharding)]
                for each in self._parts.replicas:
                    runtimes.append(self._runtime(each.weights, each.executables, each.sharding))
                with programs_run():
                    self._engine = (
                        build_engine(runtimes[0], self._engine_options)
                        if len(runtimes) == 1
                        else DataParallelEngines(runtimes, self._engine_options)
                    )
                if self._parts.content is not None and isinstance(self._engine, Engine):
                    when_idle(self._engine, functools.partial(move_into_huge_pages, self._parts.content))
            return self._engine

    def _runtime(self, weights: dict[str, Weight], executables: ExecutableCache, sharding: Any) -> Any:
        rules = TransformersBehaviour(**self._record.sampling_rules)
        return RecordedRuntime(self._side, weights, executables, self.config, self._record.limits, sharding, rules)

    def stats(self) -> EngineStats | None:
        """Returns the statistics of the engine; None before the first request."""
        _check_open(self)
        each = [engine.stats() for engine in engines_of(self)]
        return EngineStats.sum_of(each) if each else None

    def iter_tokens(
        self,
        prompt_ids: Sequence[int],
        generation_config: Any = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        params: SamplingParams | None = None,
        masks: Any = None,
        fork_of: TokenStream | None = None,
    ) -> TokenStream:
        """Yields new token ids of one prompt as they come; see `ServedModel.iter_tokens`."""
        _check_open(self)
        config = copy.copy(self.generation_config) if generation_config is None else generation_config
        if self._side.loaded is None and inputs is None and type(config) is GenerationValues:
            request = tokens_request(self, prompt_ids, config, params, seed=seed, masks=masks)
            return TokenStream(self.submit_prompt(request, None if fork_of is None else fork_of.handle))
        model = self._side.get()
        if type(config) is GenerationValues:
            config = config.written_into(model.generation_config)
        tokens: TokenStream = model.iter_tokens(
            prompt_ids, config, inputs=inputs, seed=seed, params=params, masks=masks, fork_of=fork_of
        )
        return tokens

    def submit_prompt(self, request: Request, fork_of: RequestHandle | None = None) -> RequestHandle:
        """Submits a checked request; see `ServedModel.submit_prompt`."""
        _check_open(self)
        params, parent = request.params, None if fork_of is None else fork_of.request_id
        is_recorded = type(params.config) is GenerationValues
        if self._side.loaded is None and request.inputs is None and is_recorded and not params.unsupported:
            own = request if parent is None else dataclasses.replace(request, fork_of=parent)
            handle: RequestHandle = self.engine.submit(own)
            return handle
        model = self._side.get()
        if is_recorded:
            params = dataclasses.replace(params, config=params.config.written_into(model.generation_config))
        found: RequestHandle = model.submit_prompt(dataclasses.replace(request, params=params), fork_of)
        return found

    def chat(self, *args: Any, stream: bool = False, **kwargs: Any) -> str | TextStream:
        """Answers a conversation; see `torchax_serve.text.chat`."""
        _check_open(self)
        answer: str | TextStream = chat(self, *args, stream=stream, **kwargs)  # type: ignore[call-overload]
        return answer

    def stream(self, *args: Any, **kwargs: Any) -> TextStream:
        """Yields the text that follows a prompt; see `torchax_serve.text.text_stream.stream`."""
        _check_open(self)
        return stream(self, *args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> list[Completion]:
        """Returns completions of many prompts; see `torchax_serve.text.generate_batch`."""
        _check_open(self)
        return generate_batch(self, *args, **kwargs)


def before_trace(side: TorchSide) -> None:
    """Loads what a trace needs; in the background only behind longer work."""
    if side.loaded is None:
        wait_for_work(MIN_WORK_S)
        side.get()


def engines_of(model: Any) -> list[Any]:
    """Returns the engines of a served model that there are; none before its first request."""
    model = vars(model).get("current", model)  # of a bundle that is watched
    if issubclass(type(model), RecordedModel) and model._side.loaded is not None:
        model = model._side.loaded
    engines = (vars(model).get(name) for name in ("_engine", "_single_engine"))
    return [engine for engine in engines if hasattr(engine, "stats")]  # one that cannot be made is an error


def when_idle(engine: Engine, function: Callable[[], object]) -> None:
    """Calls `function` on a thread once `engine` has answered, or worked for some seconds."""

    def run() -> None:
        began = time.monotonic()
        while engine.close_reason is None:
            stats = engine.stats()
            is_busy = bool(stats.scheduler.num_running) and time.monotonic() - began < BUSY_S
            if stats.num_steps and not is_busy:
                function()
                return
            time.sleep(POLL_S)

    threading.Thread(target=run, name="huge-pages", daemon=True).start()


def _check_open(model: RecordedModel) -> None:
    model._process.check("a model")
    if model._is_closed:
        raise _closed_error()


def _closed_error() -> TorchaxServeError:
    return TorchaxServeError("expected an open model, this one is closed; call serve() again")


def _tokenizer(side: TorchSide, record: TokenizerRecord) -> RecordedTokenizer:
    """Returns the tokenizer, which is made by a thread of its own."""
    backend: Future[Any] = Future()

    def make() -> None:
        try:
            made = record.tokenizer()
            give_back_freed()  # what reading its vocabulary took
            backend.set_result(made)
        except BaseException as error:
            backend.set_exception(error)

    # Not a daemon: a process that ends while a thread is inside the tokenizers library is aborted.
    threading.Thread(target=make, name="make-tokenizer").start()
    return RecordedTokenizer(side, lambda model: model.tokenizer, record, backend)
