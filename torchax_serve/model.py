"""`serve` and the model it returns."""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, overload

import jax
import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from model_adapters.errors import TorchaxServeError, UnsupportedArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel, Progress, load_model
from torchax_serve import collector
from torchax_serve.compile_cache import enable_compile_cache, programs_dir
from torchax_serve.decode_loop import DecodeLoop, LoopRequest, why_not_fast
from torchax_serve.drop_in import attach
from torchax_serve.engine.build import EngineOptions, build_engine
from torchax_serve.engine.engine import Engine, EngineStats
from torchax_serve.engine.request import RowRequest
from torchax_serve.engine.sampler_params import ENGINE_OPTIONS
from torchax_serve.engine.tokens import TokenStream
from torchax_serve.program_cache import ProgramCache, model_identity
from torchax_serve.request import SamplingParams
from torchax_serve.runtime import Runtime
from torchax_serve.sampling import unsupported_by_fast_path
from torchax_serve.text import Completion, TextStream, chat, generate_batch, stream


def serve(
    model: str | os.PathLike[str] | PreTrainedModel | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    random_weights: bool = False,
    engine: EngineOptions | None = None,
) -> ServedModel:
    """Loads a model and makes it run on JAX, its code untouched.

    Args:
        model: a short name (``gemma-3-1b-it``), a hub id, a local folder, a loaded `PreTrainedModel`, or None for the
            small model that comes with the package.
        revision: branch, tag or commit on the hub.
        token: access token for gated repositories.
        local_files_only: never touch the network.
        dtype: of the weights; "auto" follows the checkpoint.
        trust_remote_code: run code that comes with the checkpoint.
        allow_pickle: read pickle files where there are no safetensors.
        cache_dir: where downloads are kept; None is the hub library's own folder.
        progress: shows download, load and compilation.
        random_weights: make the weights up, from the configuration alone.
        engine: how requests are batched and how much memory their cache may take; None chooses.

    Raises:
        TorchaxServeError: one of its kinds, each saying what was expected, what came, and what to do.
    """
    enable_compile_cache()
    with collector.paused():
        loaded = load_model(
            model,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            cache_dir=cache_dir,
            progress=progress,
            random_weights=random_weights,
        )
        return ServedModel(loaded, engine)


class ServedModel:
    """A model that runs on JAX; made by `serve`. A context manager: leaving it frees the weights.

    Attributes:
        torch_model: the transformers model object whose ``forward`` and ``generate`` run on JAX, for code that wants
            one (``transformers.pipeline``, lm-eval).
    """

    def __init__(self, loaded: LoadedModel, engine_options: EngineOptions | None = None) -> None:
        self._loaded: LoadedModel | None = loaded
        self._engine_options = engine_options
        self._engine: Engine | UnsupportedModelError | None = None  # made at the first request
        self._engine_lock = threading.Lock()
        self.name = loaded.source.name
        self.config = loaded.config
        self.dtype: torch.dtype = loaded.module.dtype
        self.load_report = loaded.report
        self.torch_model: Any = attach(loaded.module, Runtime(loaded.module, loaded.weights, _programs_of(loaded)))

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends requests on the engine with an error, and frees the weights.

        Closing twice is fine; any other call afterwards raises.
        """
        self._loaded = None
        with self._engine_lock:
            if isinstance(self._engine, Engine):
                self._engine.close("the model was closed")
            self._engine = None
        if hasattr(self, "torch_model"):
            self.torch_model._jax_runtime.weights.clear()
            del self.torch_model

    @property
    def engine(self) -> Engine:
        """The engine on which requests of all threads run side by side; made, and its cache with it, when first used.

        Raises:
            UnsupportedModelError: the model's forward does not let requests be batched; `generate` and `iter_tokens`
                work all the same.
        """
        self._open()
        with self._engine_lock:
            if self._engine is None:
                try:
                    self._engine = build_engine(self._generator()._jax_runtime, self._engine_options)
                except UnsupportedModelError as error:
                    if self._engine_options is not None:
                        raise
                    self._engine = error
            if isinstance(self._engine, UnsupportedModelError):
                raise self._engine
            return self._engine

    def stats(self) -> EngineStats | None:
        """Requests running and waiting, pages in use, prefix hits, tokens/s; None before the first request."""
        self._open()
        return self._engine.stats() if isinstance(self._engine, Engine) else None

    @property
    def generation_config(self) -> GenerationConfig:
        """The defaults of ``generate``, from the model's ``generation_config.json``."""
        return self._generator().generation_config

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, or None if it came without one."""
        return self._open().tokenizer()

    @property
    def device_description(self) -> str:
        """The device in words, such as ``cpu`` or ``TPU v6 lite x 8``."""
        devices = jax.devices()
        kind = devices[0].device_kind
        return kind if len(devices) == 1 else f"{kind} x {len(devices)}"

    def _open(self) -> LoadedModel:
        if self._loaded is None:
            raise TorchaxServeError("expected an open model, this one is closed; call serve() again")
        return self._loaded

    def _generator(self) -> Any:
        self._open()
        if not self.torch_model.can_generate():
            raise UnsupportedModelError(
                f"{type(self.torch_model).__name__} does not generate text; call the model on its inputs instead"
            )
        return self.torch_model

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' ``generate``: the same arguments, defaults and return types."""
        return self._generator().generate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, torch tensors in and out."""
        self._open()
        return self.torch_model(*args, **kwargs)

    def iter_tokens(
        self,
        prompt_ids: Sequence[int],
        generation_config: GenerationConfig | None = None,
        *,
        stop_strings: Sequence[str] | None = None,
        seed: int | None = None,
        params: SamplingParams | None = None,
    ) -> Iterator[int]:
        """New token ids of one prompt, as they come, the one that ends it included.

        The request goes to the engine at once. What the engine does not take (stop strings that may begin in the
        prompt, decoding methods other than greedy and sampling, models that cannot be batched) runs by itself, from
        the first token that is asked for. Closing the iterator stops decoding; the model stays usable. With a `seed`,
        sampling draws the same tokens whatever else runs; without one, each request draws anew from torch's global
        generator.

        Raises:
            UnsupportedArgumentError: `params` has options that only the engine knows, and this runs without it.
        """
        model = self._generator()
        config = model.generation_config if generation_config is None else generation_config
        why = self._why_not_engine(config, stop_strings)
        if why is None:
            vocab_size = model._jax_runtime.vocab_size
            if seed is None:  # torch.manual_seed makes it repeatable, as in transformers
                seed = int(torch.randint(2**63 - 1, ())) if config.do_sample else 0
            request = RowRequest.of(prompt_ids, config, params, vocab_size=vocab_size, seed=seed)
            return TokenStream(self.engine.submit(request))
        if params is not None and (unknown := params.engine_only()):
            raise UnsupportedArgumentError(
                f"{', '.join(unknown)}: expected a request that the engine takes, and this one is not ({why}); "
                "leave the option out"
            )
        return self._iter_alone(model, prompt_ids, config, stop_strings, seed)

    def _why_not_engine(self, config: GenerationConfig, stop_strings: Sequence[str] | None) -> str | None:
        if stop_strings:
            return "it has stop strings that may begin in the prompt"
        if options := unsupported_by_fast_path(config, ENGINE_OPTIONS):
            return f"{', '.join(options)} is set"
        try:
            _ = self.engine
        except UnsupportedModelError as error:
            return str(error)
        return None

    def _iter_alone(
        self,
        model: Any,
        prompt_ids: Sequence[int],
        config: GenerationConfig,
        stop_strings: Sequence[str] | None,
        seed: int | None,
    ) -> Iterator[int]:
        kwargs: dict[str, Any] = {"generation_config": config}
        if stop_strings:
            kwargs |= {"stop_strings": list(stop_strings), "tokenizer": self.tokenizer}
        input_ids = torch.tensor([list(prompt_ids)], dtype=torch.long)
        request = model.generate(input_ids, custom_generate=_as_request, **kwargs)
        if isinstance(request, LoopRequest) and why_not_fast(model._jax_runtime, request) is None:
            for token in DecodeLoop(model._jax_runtime, request, seed).tokens():
                yield int(token[0])
        else:
            yield from _tokens_of_plain_loop(model, input_ids, kwargs, seed)

    @overload
    def chat(
        self,
        messages: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = ...,
        *,
        stream: Literal[False] = ...,
        system: str | None = ...,
    ) -> str: ...
    @overload
    def chat(
        self,
        messages: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = ...,
        *,
        stream: Literal[True],
        system: str | None = ...,
    ) -> TextStream: ...
    def chat(
        self,
        messages: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        system: str | None = None,
    ) -> str | TextStream:
        """The answer to a conversation; see `torchax_serve.text.chat`."""
        if stream:
            return chat(self, messages, params, stream=True, system=system)
        return chat(self, messages, params, system=system)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> TextStream:
        """Text that follows `prompt`, piece by piece; see `torchax_serve.text.stream`."""
        return stream(self, prompt, params)

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Completions of many prompts, in their order; see `torchax_serve.text.generate_batch`."""
        return generate_batch(self, prompts, params)


def _as_request(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> LoopRequest:
    """Ends transformers' ``generate`` after its preparations, with what it prepared."""
    for name in ("synced_gpus", "tokenizer", "assistant_model", "streamer"):
        model_kwargs.pop(name, None)
    model_kwargs = {name: value for name, value in model_kwargs.items() if not (isinstance(value, dict) and not value)}
    return LoopRequest(input_ids, logits_processor, stopping_criteria, generation_config, None, model_kwargs)


def _programs_of(loaded: LoadedModel) -> ProgramCache:
    """Where the model's programs are kept; in memory alone for an object, whose code anybody may have changed."""
    folder = programs_dir()
    if folder is None or loaded.source.kind == "object":
        return ProgramCache()
    config_json = loaded.config.to_json_string(use_diff=False)
    return ProgramCache(folder, model_identity(type(loaded.module), config_json, loaded.weights))


class _Cancelled(Exception):
    """Raised in the plain loop's thread to end it."""


class _QueueStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: queue.Queue[Any] = queue.Queue()
        self.cancelled = threading.Event()
        self.seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self.cancelled.is_set():
            raise _Cancelled
        if self.seen_prompt:
            self.tokens.put(int(value.reshape(-1)[0]))
        self.seen_prompt = True

    def end(self) -> None:
        pass


def _tokens_of_plain_loop(
    model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any], seed: int | None
) -> Iterator[int]:
    """Tokens of transformers' own loop, which runs in a thread of its own."""
    streamer = _QueueStreamer()

    def run() -> None:
        try:
            with torch.random.fork_rng(devices=[], enabled=seed is not None):
                if seed is not None:
                    torch.manual_seed(seed)
                model.generate(input_ids, streamer=streamer, **kwargs)
            streamer.tokens.put(None)
        except _Cancelled:
            pass
        except BaseException as error:
            streamer.tokens.put(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while (item := streamer.tokens.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        streamer.cancelled.set()
        thread.join()
