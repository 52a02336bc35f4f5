"""`ServedModel`: a model that generates, as `serve` returns it."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from model_adapters.errors import (
    InvalidArgumentError,
    TorchaxServeError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from model_adapters.jax_settings import programs_run
from torchax_serve.engine.data_parallel import DataParallelEngines
from torchax_serve.engine.engine import Engine
from torchax_serve.engine.factory import build_engine, build_single_engine, no_engine
from torchax_serve.engine.options import EngineOptions
from torchax_serve.engine.request_handle import RequestHandle, TokenStream
from torchax_serve.entrypoints.live_adapters import LiveAdapters
from torchax_serve.outputs import Completion, EngineStats
from torchax_serve.sampling.token_masks import TokenMasks
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.scheduler import Request
from torchax_serve.start.record import StartFolder
from torchax_serve.start.recorded_objects import GenerationValues
from torchax_serve.start.stored_model import StoredModel
from torchax_serve.text import TextStream, chat, generate_batch, stream
from torchax_serve.text.call_hints import refuses_unknown_options
from torchax_serve.text.prompt import encode_prompt, tokens_request

if TYPE_CHECKING:  # they import torch, which a stored model needs not
    import torch
    from transformers import GenerationConfig

    from model_adapters.loading import LoadedModel
    from torchax_serve.distributed.hosts.leader import Leader
    from torchax_serve.entrypoints.torch_model import TorchModel


class ServedModel(LiveAdapters):
    """A model that generates, with weights on the devices of JAX; made by `serve`.

    A context manager: leaving it ends the requests and frees the weights.

    Attributes:
        writes_text: Whether it generates; encoders do not.
        transcribes: Whether it is a `SpeechModel`.
    """

    writes_text, transcribes = True, False

    def __init__(
        self,
        model: LoadedModel | StoredModel,
        engine_options: EngineOptions | None = None,
        leader: Leader | None = None,
    ) -> None:
        self._engine_options = engine_options
        self._engine: Engine | DataParallelEngines | UnsupportedModelError | None = None  # made at the first request
        # A signal handler may ask for the engine while the code that it interrupts has the lock.
        self._engine_lock = threading.RLock()
        self._update_lock, self._adapter_lock = threading.Lock(), threading.Lock()
        self._single_engine: Engine | None = None  # made at its first request
        self._is_building = False
        self._engine_changes = 0
        self._start_folder: StartFolder | None = None  # where the record of this start is to be written
        super().__init__(model, leader)

    def _torch_model_of(self, loaded: LoadedModel) -> TorchModel:
        from transformers import GenerationMixin

        from torchax_serve.runtime.model_generate import overrides_generate

        # What help and completion show of `generate`, which is transformers' own.
        functools.update_wrapper(ServedModel.generate, GenerationMixin.generate)
        found = super()._torch_model_of(loaded)
        if overrides_generate(found.module) or (self.transcribes and loaded.config.is_encoder_decoder):
            found.run_rows_on(lambda: self.engine, lambda: self.single_engine)
        return found

    def __repr__(self) -> str:
        described, engine = super().__repr__(), vars(self).get("_engine")
        if isinstance(engine, UnsupportedModelError):
            return f"{described[:-1]}, no engine>"
        return described if engine is None else f"{described[:-1]}, engine: {engine.description}>"

    def close(self) -> None:
        """Ends requests on the engine with an error and frees the weights.

        Closing twice does nothing; any other call afterwards raises.
        """
        if not self._process.is_current:
            return  # a forked child: engine and weights are the parent's
        self._is_open = False
        with self._engine_lock:
            self._close_engines("the model was closed")
        super().close()

    @property
    def engine(self) -> Engine | DataParallelEngines:
        """Engine that runs the requests of all threads in one batch.

        The first use makes the engine and its cache.

        Raises:
            UnsupportedModelError: requests of this model cannot be batched; `generate` and `iter_tokens` still work.
        """
        self._check_open()
        if self._side.loaded is not None:
            self._side.loaded.follow()
        with self._engine_lock:
            if isinstance(self._engine, UnsupportedModelError) and self._engine_changes != self._num_changes:
                self._engine = None
            if self._engine is None:
                self._engine_changes = self._num_changes
                self._engine = self._engine_or_reason()
            if isinstance(self._engine, UnsupportedModelError):
                raise self._engine
            if self._engine_changes != self._num_changes:
                raise TorchaxServeError(
                    f"{self._side.get().last_change} has changed since the engine was made, which has results of the "
                    "model before that; call model.refresh(), which ends requests that run, and send this one again"
                )
            return self._engine

    @property
    def _num_changes(self) -> int:
        return 0 if self._side.loaded is None else self._side.loaded.num_changes

    @property
    def single_engine(self) -> Engine:
        """Engine that runs, one at a time, the requests that `engine` does not take."""
        self._followed()
        with self._engine_lock:
            if self._single_engine is None:
                self._single_engine = build_single_engine(self._generator()._jax_runtime, self._engine_options)
            return self._single_engine

    def _engine_or_reason(self) -> Engine | DataParallelEngines | UnsupportedModelError:
        if self._is_building:
            raise TorchaxServeError(
                "expected an engine that is made, and this call came, as from a signal handler, while it was being "
                "made; call again when the interrupted code has returned"
            )
        self._is_building = True
        try:
            with programs_run():
                return self._build_engine()
        except UnsupportedModelError as error:
            return error
        finally:
            self._is_building = False

    def refresh(self) -> None:
        """Makes programs, arrays and the engine again after a change of `torch_model`.

        Running requests are ended.
        """
        with self._engine_lock:
            self._close_engines("the model was refreshed")
        super().refresh()

    def _build_engine(self) -> Engine | DataParallelEngines:
        if self._stored is not None and self._side.loaded is None:
            return self._engine_on_stored(self._stored)
        torch_model: TorchModel = self._side.get()
        if (reason := torch_model.no_engine_reason()) is not None:
            raise no_engine(reason, self._engine_options)
        if len(torch_model.runtimes) > 1:
            return DataParallelEngines(torch_model.runtimes, self._engine_options, self._adapters)
        model = torch_model.generator
        engine = build_engine(model._jax_runtime, self._engine_options, adapters=self._adapters)
        folder, self._start_folder = self._start_folder, None
        if folder is not None and model is torch_model.module:
            from torchax_serve.start.recording import record_in_background

            record_in_background(folder, torch_model.loaded, model._jax_runtime)
        return engine

    def _engine_on_stored(self, stored: StoredModel) -> Engine | DataParallelEngines:
        """Returns the engine on stored programs; what they lack loads the torch module."""
        self._executables = stored.executables(self._side.get_before_trace)
        runtimes: list[Any] = stored.runtimes(self._side, self._executables)
        engine = (
            build_engine(runtimes[0], self._engine_options)
            if len(runtimes) == 1
            else DataParallelEngines(runtimes, self._engine_options)
        )
        self._engine_weights = stored.weights
        stored.move_when_idle(engine)
        return engine

    def _close_engines(self, why: str) -> None:
        for engine in (self._engine, self._single_engine):
            if isinstance(engine, Engine | DataParallelEngines):
                engine.close(why)
        self._engine = self._single_engine = None

    @property
    def running_engines(self) -> list[Engine | DataParallelEngines]:
        """The engines that there are; none before the first request."""
        engines = (self._engine, self._single_engine)
        return [engine for engine in engines if isinstance(engine, Engine | DataParallelEngines)]

    def stats(self) -> EngineStats | None:
        """Returns requests running and waiting, pages in use, prefix hits, tokens/s.

        None before the first request.
        """
        self._check_open()
        each = [engine.stats() for engine in self.running_engines]
        return EngineStats.sum_of(each) if each else None

    @property
    def generation_config(self) -> GenerationConfig:
        """Defaults of ``generate``, from the model's ``generation_config.json``."""
        return self._generator().generation_config

    @property
    def request_defaults(self) -> Any:
        """The same for requests of text, which need no more of it than its values."""
        if self._stored is not None and self._side.loaded is None:
            return self._stored.generation_values
        return self.generation_config

    def _generator(self) -> Any:
        self._check_open()
        return self._side.get().generator

    def _check_generates(self) -> None:
        """Raises UnsupportedModelError if the model does not generate; a stored one does."""
        self._check_open()
        if self._side.loaded is not None:
            self._generator()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Runs transformers' ``generate``: the same arguments, defaults and return types.

        The rows that an encoder-decoder class with its own ``generate`` prepares, such as Whisper's, run on the engine
        if they can, in a batch with requests of other threads; see `torchax_serve.generation.engine_rows`.
        """
        if kwargs.get("custom_generate") is not None:  # which gets the module
            self.runtime.watch.is_held = True
        return self._generator().generate(*args, **kwargs)

    def iter_tokens(
        self,
        prompt_ids: Sequence[int],
        generation_config: GenerationConfig | None = None,
        *,
        inputs: Mapping[str, torch.Tensor] | None = None,
        seed: int | None = None,
        params: SamplingParams | None = None,
        masks: TokenMasks | None = None,
        fork_of: TokenStream | None = None,
    ) -> TokenStream:
        """Yields new token ids of one prompt as they come, including the token that ends the answer.

        The request is submitted at once: to the engine, or to `single_engine` if the engine does not take it; see
        `torchax_serve.generation.routing`. Closing the iterator ends the request.

        Args:
            prompt_ids: Token ids of the prompt.
            generation_config: Limits and options of decoding; None: the model's own. Without a limit the answer ends
                after 256 tokens.
            inputs: All tensors of the prompt by argument of ``generate``, where it has more than token ids.
            seed: Seed of sampling, repeatable whatever else runs; None: a new one, from torch's global generator where
                torch is imported.
            params: Sampling parameters, merged into `generation_config`.
            masks: Tokens that may be sampled, step by step, such as those of a grammar; None: all.
            fork_of: Another answer to the same prompt, whose pages are shared on the engine.

        Raises:
            InvalidArgumentError: token ids outside the vocabulary.
            UnsupportedArgumentError: stop strings, several answers, or options of the engine that it cannot honour.
            QueueFullError: too many requests are waiting.
        """
        self._check_generates()
        config = self.request_defaults if generation_config is None else _checked_config(generation_config)
        request = tokens_request(self, prompt_ids, config, params, inputs=inputs, seed=seed, masks=masks)
        return TokenStream(self.submit_prompt(request, None if fork_of is None else fork_of.handle))

    def submit_prompt(self, request: Request, fork_of: RequestHandle | None = None) -> RequestHandle:
        """Submits a checked request: to the engine, or else to `single_engine`.

        Args:
            request: The request.
            fork_of: Handle of another answer to the same prompt.
        """
        self._check_generates()
        params, parent = request.params, None if fork_of is None else fork_of.request_id
        if request.generate_inputs is None and (engine := self._engine_of_text(request)) is not None:
            if params.seed is None and params.config.do_sample and "torch" in sys.modules:
                from torchax_serve.generation.call_limits import draw_seed

                params = dataclasses.replace(params, seed=draw_seed(do_sample=True))
            if parent is not None or params is not request.params:
                request = dataclasses.replace(request, params=params, fork_of=parent)
            return engine.submit(request)
        torch_model: TorchModel = self._side.get()
        if isinstance(params.config, GenerationValues):
            params = dataclasses.replace(params, config=params.config.written_into(self.generation_config))
            request = dataclasses.replace(request, params=params)
        found = torch_model.routed_request(request, lambda: self.engine)
        if isinstance(found, Request):
            return self.engine.submit(dataclasses.replace(found, masks=request.masks, fork_of=parent))
        if request.masks is not None:
            raise UnsupportedArgumentError(
                f"masks: expected a request that the engine takes, and this one is not ({found.reason}); leave it out"
            )
        return self.single_engine.submit(torch_model.single_request(request, found))

    def _engine_of_text(self, request: Request) -> Engine | DataParallelEngines | None:
        """Returns the engine for a request of text; None where it is routed."""
        torch_model = self._side.loaded
        if torch_model is not None:
            torch_model.check_placeholders(request)
        if request.params.unsupported or (torch_model is not None and torch_model.has_encoder):
            return None
        try:
            return self.engine
        except UnsupportedModelError:
            if torch_model is None:
                raise
            return None

    @overload
    def chat(
        self,
        messages: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = ...,
        *,
        stream: Literal[False] = ...,
        system: str | None = ...,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = ...,
        documents: Sequence[Mapping[str, Any]] | None = ...,
        chat_template_kwargs: Mapping[str, Any] | None = ...,
        continue_final_message: bool = ...,
    ) -> str: ...
    @overload
    def chat(
        self,
        messages: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = ...,
        *,
        stream: Literal[True],
        system: str | None = ...,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = ...,
        documents: Sequence[Mapping[str, Any]] | None = ...,
        chat_template_kwargs: Mapping[str, Any] | None = ...,
        continue_final_message: bool = ...,
    ) -> TextStream: ...
    @refuses_unknown_options
    def chat(
        self,
        messages: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str | TextStream:
        """Answers a conversation: a string, or a `TextStream` with ``stream=True``.

        See `torchax_serve.text.chat` for the arguments and errors.
        """
        self._check_generates()  # a model that does not generate says so before it misses a template
        options: dict[str, Any] = {
            "system": system,
            "tools": tools,
            "documents": documents,
            "chat_template_kwargs": chat_template_kwargs,
            "continue_final_message": continue_final_message,
        }
        if stream:
            return chat(self, messages, params, stream=True, **options)
        return chat(self, messages, params, **options)

    def label_scores(self, prompts: Sequence[str | Sequence[int]], labels: Sequence[str]) -> np.ndarray:
        """Returns the probability of each label as the next token of a prompt.

        The probabilities of a prompt's labels add up to 1: with yes and no they are the scores of rerankers that
        generate, whose model card says the prompt.

        Args:
            prompts: Texts or token ids.
            labels: Texts of one token each.

        Returns:
            float32[num_prompts, num_labels].

        Raises:
            InvalidArgumentError: a label that is not one token, or a prompt that is empty or too long.
        """
        from torchax_serve.pooling.logit_score import label_logprobs

        self._check_generates()
        tokenizer: Any = self.text_tokenizer
        ids = [tokenizer(label, add_special_tokens=False)["input_ids"] for label in labels]
        for label, tokens in zip(labels, ids, strict=True):
            if len(tokens) != 1 or ids.count(tokens) > 1:
                raise InvalidArgumentError(
                    f"labels: expected different texts of one token each, got {label!r}, which has {len(tokens)}"
                )
        found = label_logprobs(self, [encode_prompt(self, prompt) for prompt in prompts], [each[0] for each in ids])
        return np.exp(found)

    @refuses_unknown_options
    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> TextStream:
        """Yields the text that follows `prompt`, piece by piece.

        See `torchax_serve.text.text_stream.stream`.
        """
        return stream(self, prompt, params)

    @refuses_unknown_options
    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Returns completions of many prompts, in their order.

        See `torchax_serve.text.generate_batch`.
        """
        return generate_batch(self, prompts, params)


def record_start(model: ServedModel, folder: StartFolder) -> None:
    """Makes the next start of `model` quick: writes its record once there is an engine."""
    model._start_folder = folder


def _checked_config(config: Any) -> Any:
    """Returns `config`; raises InvalidArgumentError if it is no GenerationConfig."""
    from transformers import GenerationConfig

    if isinstance(config, GenerationConfig):
        return config
    raise InvalidArgumentError(
        f"generation_config: expected a GenerationConfig, got {type(config).__name__}; write GenerationConfig(...), or "
        "give params=SamplingParams(...)"
    )
