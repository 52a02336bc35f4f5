"""`ServedModel`: a model that generates, as `serve` returns it."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self, overload

import torch
from transformers import GenerationConfig, GenerationMixin

from model_adapters.errors import (
    InvalidArgumentError,
    TorchaxServeError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from model_adapters.loading import LoadedModel, has_own_generate
from model_adapters.loading.generative_class import with_head
from model_adapters.program.trace_context import programs_run
from torchax_serve.distributed.hosts.leader import Leader
from torchax_serve.engine.data_parallel import DataParallelEngines
from torchax_serve.engine.engine import Engine
from torchax_serve.engine.factory import build_engine
from torchax_serve.engine.options import EngineOptions
from torchax_serve.engine.request_handle import TokenStream
from torchax_serve.entrypoints.base_model import BaseModel, programs_of
from torchax_serve.generation.engine_rows import EngineRows, engine_request_for
from torchax_serve.generation.jax_model import rows_elsewhere, run_on_jax
from torchax_serve.generation.media_answer import stream_about_media
from torchax_serve.generation.threaded_generate import is_beam_search, iter_tokens_unbatched
from torchax_serve.multimodal.placeholders import check_has_media
from torchax_serve.outputs import Completion, EngineStats
from torchax_serve.runtime.model_generate import overrides_generate, without_model_options
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.sampling import unsupported_options
from torchax_serve.sampling.row_params import ENGINE_OPTIONS
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text import TextStream, chat, generate_batch, stream
from torchax_serve.text.chat_template import ChatOptions
from torchax_serve.text.prompt import checked_ids, detokenizer_of, encode_prompt, given_or_default
from torchax_serve.validation.argument_checks import short_repr


class ServedModel(BaseModel):
    """A model that runs on JAX; made by `serve`. A context manager: leaving it frees the weights."""

    def __init__(
        self, loaded: LoadedModel, engine_options: EngineOptions | None = None, leader: Leader | None = None
    ) -> None:
        self._engine_options = engine_options
        self._engine: Engine | DataParallelEngines | UnsupportedModelError | None = None  # made at the first request
        # A signal handler may ask for the engine while the code that it interrupts has the lock.
        self._engine_lock = threading.RLock()
        self._is_building = False
        self._engine_changes = 0
        super().__init__(loaded, leader)

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """Ends requests on the engine with an error, and frees the weights.

        Closing twice is fine; any other call afterwards raises.
        """
        if not self._process.is_current:
            return  # a forked child: engine and weights are the parent's
        self._loaded = None
        if (head := vars(self).pop("_generates_with_head", None)) is not None:
            head._jax_runtime.weights.clear()
        with self._engine_lock:
            if isinstance(self._engine, Engine | DataParallelEngines):
                self._engine.close("the model was closed")
            self._engine = None
        super().close()

    @property
    def engine(self) -> Engine | DataParallelEngines:
        """The engine on which requests of all threads run side by side; made, and its cache with it, when first used.

        Raises:
            UnsupportedModelError: the model's forward does not let requests be batched; `generate` and `iter_tokens`
                work all the same.
        """
        self._followed()
        with self._engine_lock:
            if isinstance(self._engine, UnsupportedModelError) and self._engine_changes != self._num_changes():
                self._engine = None
            if self._engine is None:
                self._engine_changes = self._num_changes()
                self._engine = self._engine_or_reason()
            if isinstance(self._engine, UnsupportedModelError):
                raise self._engine
            if self._engine_changes != self._num_changes():
                raise TorchaxServeError(
                    "the model has changed since its engine was made, which keeps what the model computed before; call "
                    "model.refresh(), which ends requests that run, and send this one again"
                )
            return self._engine

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

    def _num_changes(self) -> int:
        return sum(runtime.num_changes for runtime in self._runtimes)

    def refresh(self) -> None:
        """Makes programs, arrays and the engine anew, after `torch_model` has changed. Ends requests that run."""
        with self._engine_lock:
            if isinstance(self._engine, Engine | DataParallelEngines):
                self._engine.close("the model was refreshed")
            self._engine = None
        super().refresh()

    def _build_engine(self) -> Engine | DataParallelEngines:
        model = self._generator()
        if (why := model._jax_runtime.why_stepwise) is not None:
            raise UnsupportedModelError(f"{why}, which sees one call at a time; remove it, or call generate()")
        if has_own_generate(model):
            raise UnsupportedModelError(
                "the model's repository brings a generate of its own, which the engine cannot run; call generate(), "
                "or load the model without trust_remote_code"
            )
        if len(self._runtimes) > 1:
            return DataParallelEngines(self._runtimes, self._engine_options)
        return build_engine(model._jax_runtime, self._engine_options)

    def stats(self) -> EngineStats | None:
        """Requests running and waiting, pages in use, prefix hits, tokens/s; None before the first request."""
        self._loaded_or_raise()
        return self._engine.stats() if isinstance(self._engine, Engine | DataParallelEngines) else None

    @property
    def generation_config(self) -> GenerationConfig:
        """The defaults of ``generate``, from the model's ``generation_config.json``."""
        return self._generator().generation_config

    def _generator(self) -> Any:
        self._loaded_or_raise()
        return self.torch_model if self.torch_model.can_generate() else self._generates_with_head

    @functools.cached_property
    def _generates_with_head(self) -> Any:
        """What generates over the weights of a base model, as its type's class with a tied head does."""
        loaded = self._loaded_or_raise()
        module, weights = with_head(loaded)
        return run_on_jax(
            module, ModelRuntime(module, weights, programs_of(dataclasses.replace(loaded, module=module)))
        )

    @functools.cached_property
    def _engine_rows(self) -> EngineRows:
        return EngineRows(self.torch_model, lambda: self.engine)

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' ``generate``: the same arguments, defaults and return types.

        What a class's own ``generate`` prepares for a decoder beside an encoder, such as Whisper's, runs on the engine
        where it can, side by side with rows of other threads.
        """
        model = self._generator()
        is_prepared = model._jax_runtime.encoder is not None and overrides_generate(model)
        with rows_elsewhere(self._engine_rows if is_prepared else None):
            return model.generate(*args, **kwargs)

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
            InvalidArgumentError: token ids outside the vocabulary, or stop strings without a tokenizer.
            UnsupportedArgumentError: `params` has options that only the engine knows, and this runs without it; or
                options about texts and answers, which are not yielded here.
            QueueFullError: too many requests wait already.
        """
        model = self._generator()
        prompt_ids = checked_ids(self, encode_prompt(self, prompt_ids))
        check_has_media(self.config, prompt_ids, ())
        config = model.generation_config if generation_config is None else generation_config
        _check_one_answer(config)
        if stop_strings:
            detokenizer_of(self, stop_strings)  # refuses them where there is no tokenizer
        if params is not None:
            config, seed = _merged(config, params), params.seed if seed is None else seed
            params = params.only_engine_options()
        why = self._engine_unsupported_reason(config, stop_strings, len(prompt_ids))
        if why is None:
            if seed is None:  # torch.manual_seed makes it repeatable, as in transformers
                seed = int(torch.randint(2**63 - 1, ())) if config.do_sample else 0
            request = engine_request_for(model, prompt_ids, config, params, seed)
            if request is not None:
                return TokenStream(self.engine.submit(request))
            why = "its generate does more than it prepares for the loop over tokens"
        if params is not None and (unknown := params.engine_only()):
            raise UnsupportedArgumentError(
                f"{', '.join(unknown)}: expected a request that the engine takes, and this one is not ({why}); "
                "leave the option out" + (", or set num_beams=1" if is_beam_search(config) else "")
            )
        return self._iter_unbatched(model, prompt_ids, config, stop_strings, seed)

    def _engine_unsupported_reason(
        self, config: GenerationConfig, stop_strings: Sequence[str] | None, prompt_len: int
    ) -> str | None:
        if stop_strings:
            return "it has stop strings that may begin in the prompt"
        model = self._generator()
        runtime = model._jax_runtime
        encoder = runtime.encoder
        runs_before = encoder is not None and encoder.runs_before_engine
        read = without_model_options(model, config) if runs_before else config  # the class itself reads the rest
        if options := unsupported_options(read, ENGINE_OPTIONS):
            return f"{', '.join(options)} is set"
        if runtime.program.names.has_encoder and (encoder is None or not encoder.is_masked):
            return "its encoder reads no tokens"
        try:
            longest = self.engine.max_encoder_len
        except UnsupportedModelError as error:
            return str(error)
        if longest is not None and prompt_len > longest:
            return f"its input has {prompt_len} tokens, and the engine has room for {longest} of each (max_encoder_len)"
        return None

    def _iter_unbatched(
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
        return iter_tokens_unbatched(model, input_ids, kwargs, seed)

    @overload
    def chat(
        self,
        messages: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = ...,
        *,
        stream: Literal[False] = ...,
        system: str | None = ...,
        **options: Any,
    ) -> str: ...
    @overload
    def chat(
        self,
        messages: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = ...,
        *,
        stream: Literal[True],
        system: str | None = ...,
        **options: Any,
    ) -> TextStream: ...
    def chat(
        self,
        messages: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        system: str | None = None,
        **options: Any,
    ) -> str | TextStream:
        """The answer to a conversation; see `torchax_serve.text.chat`, also for `options` such as ``tools``."""
        self._generator()  # no template is missed where there is nothing to answer with
        if stream:
            return chat(self, messages, params, stream=True, system=system, **options)
        return chat(self, messages, params, system=system, **options)

    def stream_media(
        self, conversation: list[dict[str, Any]], params: SamplingParams | None, options: ChatOptions
    ) -> TextStream:
        """Streams the answer to a conversation with images or audio; `chat` calls it."""
        return stream_about_media(self, conversation, params, options)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None, **unknown: Any) -> TextStream:
        """Text that follows `prompt`, piece by piece; see `torchax_serve.text.text_stream`."""
        return stream(self, prompt, params, **unknown)

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **unknown: Any,
    ) -> list[Completion]:
        """Completions of many prompts, in their order; see `torchax_serve.text.generate_batch`."""
        return generate_batch(self, prompts, params, **unknown)


def _check_one_answer(config: Any) -> None:
    """Raises InvalidArgumentError for what is no configuration, or asks for several answers, of which none is told."""
    if not isinstance(config, GenerationConfig):
        raise InvalidArgumentError(
            f"generation_config: expected a GenerationConfig, got {type(config).__name__}; write "
            "GenerationConfig(...), or give params=SamplingParams(...)"
        )
    if (config.num_return_sequences or 1) != 1:
        raise UnsupportedArgumentError(
            f"num_return_sequences: expected 1 for tokens of one answer, got "
            f"{short_repr(config.num_return_sequences)}; call generate_batch() with SamplingParams(n=...)"
        )


def _merged(config: GenerationConfig, params: SamplingParams) -> GenerationConfig:
    """`config` with what `params` ask of the choice of tokens.

    Raises:
        UnsupportedArgumentError: they ask for stop strings or several answers.
    """
    given_or_default(params)
    for name in ("stop", "n"):
        if (value := getattr(params, name)) not in (None, 1):
            raise UnsupportedArgumentError(
                f"{name}: expected None for tokens of one answer, got {short_repr(value)}; call "
                f"{'stream()' if name == 'stop' else 'generate_batch()'}"
            )
    return params.merged_into(config)
