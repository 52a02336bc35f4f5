"""`ServedModel`: a model that generates, as `serve` returns it."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin

from model_adapters.errors import (
    InvalidArgumentError,
    TorchaxServeError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from model_adapters.jax_settings import programs_run
from model_adapters.loading import LoadedModel
from model_adapters.loading.generative_class import with_head
from model_adapters.ops.compressed_weight import Weight
from torchax_serve.distributed.hosts.leader import Leader
from torchax_serve.engine.data_parallel import DataParallelEngines
from torchax_serve.engine.engine import Engine
from torchax_serve.engine.factory import build_engine, build_single_engine, no_engine
from torchax_serve.engine.options import EngineOptions
from torchax_serve.engine.request_handle import RequestHandle, TokenStream
from torchax_serve.entrypoints.base_model import programs_of
from torchax_serve.entrypoints.live_adapters import LiveAdapters
from torchax_serve.generation.engine_rows import EngineRows, engine_request_for, prompt_call
from torchax_serve.generation.jax_model import run_on_jax
from torchax_serve.generation.media_requests import media_request
from torchax_serve.generation.routing import (
    EngineFacts,
    ModelCapabilities,
    Path,
    Route,
    engine_unsupported_reason,
    route,
)
from torchax_serve.generation.single_request import single_request
from torchax_serve.multimodal.placeholders import check_has_media, placeholder_ids
from torchax_serve.outputs import Completion, EngineStats
from torchax_serve.pooling.logit_score import label_logprobs
from torchax_serve.runtime.model_generate import overrides_generate
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.sampling.token_masks import TokenMasks
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.scheduler import Request
from torchax_serve.start.record import StartFolder
from torchax_serve.start.recording import record_in_background
from torchax_serve.text import TextStream, chat, generate_batch, stream
from torchax_serve.text.call_hints import refuses_unknown_options
from torchax_serve.text.prompt import encode_prompt, tokens_request


class ServedModel(LiveAdapters):
    """A model that generates, with weights on the devices of JAX; made by `serve`.

    A context manager: leaving it ends the requests and frees the weights.

    Attributes:
        writes_text: Whether it generates; encoders do not.
        transcribes: Whether it is a `SpeechModel`.
    """

    writes_text, transcribes = True, False

    def __init__(
        self, loaded: LoadedModel, engine_options: EngineOptions | None = None, leader: Leader | None = None
    ) -> None:
        self._engine_options = engine_options
        self._engine: Engine | DataParallelEngines | UnsupportedModelError | None = None  # made at the first request
        # A signal handler may ask for the engine while the code that it interrupts has the lock.
        self._engine_lock = threading.RLock()
        self._single_engine: Engine | None = None  # made at its first request
        self._is_building = False
        self._engine_changes = 0
        self._start_folder: StartFolder | None = None  # where the record of this start is to be written
        super().__init__(loaded, leader)
        self._has_encoder = self.runtime.program.names.has_encoder
        self._placeholder_ids = placeholder_ids(self._config)
        if overrides_generate(self._module) or (self.transcribes and self._config.is_encoder_decoder):
            vars(self._module)["_engine_rows"] = EngineRows(
                self._module, lambda: self.engine, lambda: self.single_engine
            )

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
        self._loaded = None
        if (head := vars(self).pop("_generates_with_head", None)) is not None:
            head._jax_runtime.weights.clear()
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
        self._followed()
        with self._engine_lock:
            if isinstance(self._engine, UnsupportedModelError) and self._engine_changes != _num_changes(self._runtimes):
                self._engine = None
            if self._engine is None:
                self._engine_changes = _num_changes(self._runtimes)
                self._engine = self._engine_or_reason()
            if isinstance(self._engine, UnsupportedModelError):
                raise self._engine
            if self._engine_changes != _num_changes(self._runtimes):
                what = next((r.last_change for r in self._runtimes if r.last_change), "the model")
                raise TorchaxServeError(
                    f"{what} has changed since the engine was made, which has results of the model before that; call "
                    "model.refresh(), which ends requests that run, and send this one again"
                )
            return self._engine

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
        model = self._generator()
        if (reason := engine_unsupported_reason(ModelCapabilities.of(model._jax_runtime))) is not None:
            raise no_engine(reason, self._engine_options)
        if len(self._runtimes) > 1:
            return DataParallelEngines(self._runtimes, self._engine_options, self._adapters)
        engine = build_engine(model._jax_runtime, self._engine_options, adapters=self._adapters)
        folder, self._start_folder = self._start_folder, None
        if folder is not None and model is self._module:
            record_in_background(folder, self._loaded_or_raise(), model._jax_runtime)
        return engine

    def _close_engines(self, why: str) -> None:
        for engine in (self._engine, self._single_engine):
            if isinstance(engine, Engine | DataParallelEngines):
                engine.close(why)
        self._engine = self._single_engine = None

    def stats(self) -> EngineStats | None:
        """Returns requests running and waiting, pages in use, prefix hits, tokens/s.

        None before the first request.
        """
        self._loaded_or_raise()
        engines = (self._engine, self._single_engine)
        each = [engine.stats() for engine in engines if isinstance(engine, Engine | DataParallelEngines)]
        return EngineStats.sum_of(each) if each else None

    @property
    def generation_config(self) -> GenerationConfig:
        """Defaults of ``generate``, from the model's ``generation_config.json``."""
        return self._generator().generation_config

    def _generator(self) -> Any:
        self._loaded_or_raise()
        return self._module if self._module.can_generate() else self._generates_with_head

    @functools.cached_property
    def _generates_with_head(self) -> Any:
        """Model with a head tied to the token embeddings.

        It runs on the weights of a base model without a head.
        """
        loaded = self._loaded_or_raise()
        module, weights = with_head(loaded)
        return run_on_jax(
            module, ModelRuntime(module, weights, programs_of(dataclasses.replace(loaded, module=module)))
        )

    @functools.wraps(GenerationMixin.generate)
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
            generation_config: Limits and options of decoding; None: the model's own.
            inputs: All tensors of the prompt by argument of ``generate``, where it has more than token ids.
            seed: Seed of sampling, repeatable whatever else runs; None: a new one from torch's global generator.
            params: Sampling parameters, merged into `generation_config`.
            masks: Tokens that may be sampled, step by step, such as those of a grammar; None: all.
            fork_of: Another answer to the same prompt, whose pages are shared on the engine.

        Raises:
            InvalidArgumentError: token ids outside the vocabulary.
            UnsupportedArgumentError: stop strings, several answers, or options of the engine that it cannot honour.
            QueueFullError: too many requests are waiting.
        """
        config = self.generation_config if generation_config is None else generation_config
        if not isinstance(config, GenerationConfig):
            raise InvalidArgumentError(
                f"generation_config: expected a GenerationConfig, got {type(config).__name__}; write "
                "GenerationConfig(...), or give params=SamplingParams(...)"
            )
        request = tokens_request(self, prompt_ids, config, params, inputs=inputs, seed=seed, masks=masks)
        return TokenStream(self.submit_prompt(request, None if fork_of is None else fork_of.handle))

    def submit_prompt(self, request: Request, fork_of: RequestHandle | None = None) -> RequestHandle:
        """Submits a checked request: to the engine, or else to `single_engine`.

        Args:
            request: The request.
            fork_of: Handle of another answer to the same prompt.
        """
        model, params = self._generator(), request.params
        parent = None if fork_of is None else fork_of.request_id
        if request.inputs is None:
            self._check_placeholders(request.prompt_ids)
            if (engine := self._engine_of_text(request)) is not None:
                if params.seed is None and params.config.do_sample:
                    params = dataclasses.replace(params, seed=_drawn_seed(request))
                if parent is not None or params is not request.params:
                    request = dataclasses.replace(request, params=params, fork_of=parent)
                return engine.submit(request)
        found = self._routed_request(model, request)
        if isinstance(found, Request):
            return self.engine.submit(dataclasses.replace(found, masks=request.masks, fork_of=parent))
        if request.masks is not None:
            raise UnsupportedArgumentError(
                f"masks: expected a request that the engine takes, and this one is not ({found.reason}); leave it out"
            )
        inputs = request.inputs
        if inputs is None:
            inputs = {"input_ids": torch.tensor([list(request.prompt_ids)], dtype=torch.long)}
        single = single_request(model, found, inputs, params.config, params.given, params.seed)
        return self.single_engine.submit(single)

    def _engine_of_text(self, request: Request) -> Engine | DataParallelEngines | None:
        """Returns the engine for a request of text; None where it is routed."""
        if self._has_encoder or request.params.unsupported:
            return None
        try:
            return self.engine
        except UnsupportedModelError:
            return None

    def _routed_request(self, model: Any, request: Request) -> Request | Route:
        """Returns the engine's request, or how else the prompt runs and why."""
        config, given, seed = request.params.config, request.params.given, request.params.seed
        if request.inputs is not None:
            found = media_request(model, lambda: self.engine, request.inputs, config, given, seed)
            return Route(Path.PREPARED, found) if isinstance(found, str) else found
        facts = ModelCapabilities.of(model._jax_runtime)
        call = prompt_call(model, request.prompt_ids, config, functools.partial(_engine_facts, self))
        chosen = route(facts, call)
        if chosen.path is not Path.ENGINE:
            return chosen
        found_for = engine_request_for(model, request.prompt_ids, config, given, _drawn_seed(request))
        return found_for or route(facts, dataclasses.replace(call, ends_in_loop=False))

    def _check_placeholders(self, prompt_ids: Sequence[int]) -> None:
        """Raises InvalidArgumentError for placeholders of media in a prompt that has none."""
        if not self._placeholder_ids.isdisjoint(prompt_ids):
            check_has_media(self._config, prompt_ids, ())

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
        self._generator()  # a model that does not generate says so before it misses a template
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
        self._generator()
        tokenizer: Any = self.tokenizer
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


def continue_with(model: ServedModel, weights: dict[str, Weight], engine: Engine | DataParallelEngines | None) -> None:
    """Lets `model` take over arrays and engine of a running model of the same files.

    Args:
        model: The model.
        weights: Arrays by name.
        engine: The engine, whose requests go on; None if there is none yet.
    """
    model._runtimes[0].weights.update(weights)
    if engine is not None:
        model._engine_weights = weights
        model._engine, model._engine_changes = engine, _num_changes(model._runtimes)


def _engine_facts(model: ServedModel) -> EngineFacts:
    """Returns the limits of the engine of `model`, which is made if there is none yet."""
    try:
        return EngineFacts.of(model.engine)
    except UnsupportedModelError as error:
        return EngineFacts(str(error))


def _drawn_seed(request: Request) -> int:
    """Returns the seed of a request.

    ``torch.manual_seed`` makes a drawn one repeatable, as in transformers.
    """
    if request.params.seed is not None:
        return request.params.seed
    return int(torch.randint(2**63 - 1, ())) if request.params.config.do_sample else 0


def _num_changes(runtimes: Sequence[ModelRuntime]) -> int:
    """Returns how often the model has changed since it was loaded."""
    return sum(runtime.num_changes for runtime in runtimes)
