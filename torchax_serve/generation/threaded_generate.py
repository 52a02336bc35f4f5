"""Tokens of one request that runs without the engine, as an iterator."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from model_adapters.errors import UnsupportedModelError
from torchax_serve.generation.routing import Path
from torchax_serve.generation.static_batch import SampleCall, StaticBatchLoop, StaticBatchStart, static_batch_start
from torchax_serve.runtime.model_generate import without_model_options


def iter_tokens_unbatched(
    model: Any, path: Path, input_ids: torch.Tensor, kwargs: dict[str, Any], seed: int | None
) -> Iterator[int]:
    """Yields the new token ids of one prompt without the engine, the one that ends it included.

    A static batch and transformers' sampling loop yield each token as it comes. Beam search knows its tokens at its end
    only and yields them then; so does the ``generate`` of a model's repository, which may not honour a streamer.

    Args:
        model: what `torchax_serve.generation.jax_model.run_on_jax` returned.
        path: what `torchax_serve.generation.routing.route` chose for the prompt: `PREPARED` or `REPOSITORY`.
        input_ids: int64[1, prompt_len].
        kwargs: of ``generate``.
        seed: of sampling; None samples from torch's global generator.

    Raises:
        UnsupportedModelError: the repository's ``generate`` returns something else than one row of token ids that
            begins with the prompt.
    """
    if path is Path.REPOSITORY:
        yield from _tokens_of_own_generate(model, input_ids, kwargs, seed)
        return
    request = _prepared_request(model, input_ids, kwargs)
    if (found := _with_start(model, request)) is not None:
        for token in StaticBatchLoop(model._jax_runtime, *found, seed).tokens():
            yield int(token[0])
    elif request is not None and is_beam_search(request.config):
        with torch_seed(seed):
            output = model.generate(input_ids, **kwargs)
        sequences = getattr(output, "sequences", output)
        yield from sequences[0, request.input_ids.shape[1] :].tolist()
    else:
        yield from iter_generate_in_thread(model, {"input_ids": input_ids}, kwargs, seed)


def prepared(model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> tuple[SampleCall, StaticBatchStart] | None:
    """Returns the call that ``generate`` prepares, encoder output included; None if a static batch cannot take it.

    Args:
        model: what `torchax_serve.generation.jax_model.run_on_jax` returned.
        input_ids: int64[1, prompt_len].
        kwargs: of ``generate``.
    """
    return _with_start(model, _prepared_request(model, input_ids, kwargs))


def is_beam_search(config: GenerationConfig) -> bool:
    """Returns whether `config` asks for several beams, so that no token is final before the last one."""
    return (config.num_beams or 1) > 1


def _prepared_request(model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> SampleCall | None:
    """Returns the call that ``generate`` prepares; None if a class's own ``generate`` ends in no sampling loop."""
    request = model.generate(input_ids, custom_generate=_capture_sample_call, **kwargs)
    return request if isinstance(request, SampleCall) else None


def _with_start(model: Any, request: SampleCall | None) -> tuple[SampleCall, StaticBatchStart] | None:
    start = None if request is None else static_batch_start(model._jax_runtime, request)
    return (request, start) if request is not None and isinstance(start, StaticBatchStart) else None


def _capture_sample_call(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> SampleCall:
    """Serves as ``custom_generate``: ends transformers' ``generate`` after its preparations and returns them."""
    for name in ("synced_gpus", "tokenizer", "assistant_model", "streamer"):
        model_kwargs.pop(name, None)
    model_kwargs = {name: value for name, value in model_kwargs.items() if not (isinstance(value, dict) and not value)}
    config = without_model_options(model, generation_config)
    return SampleCall(input_ids, logits_processor, stopping_criteria, config, None, model_kwargs)


@contextlib.contextmanager
def torch_seed(seed: int | None) -> Iterator[None]:
    """Seeds torch's global generator inside the block and restores it; does nothing for None."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def _tokens_of_own_generate(
    model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any], seed: int | None
) -> Iterator[int]:
    with torch_seed(seed):
        output = model.generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)
    sequences = getattr(output, "sequences", output)
    num_rows, prompt_len = input_ids.shape
    if (
        not isinstance(sequences, torch.Tensor)
        or sequences.ndim != 2
        or len(sequences) != num_rows
        or not torch.equal(sequences[:, :prompt_len], input_ids)
    ):
        got = tuple(sequences.shape) if isinstance(sequences, torch.Tensor) else type(sequences).__name__
        raise UnsupportedModelError(
            f"the repository's own generate: expected token ids [1, length] that begin with the prompt, got {got}; "
            "call generate() for what it returns, or load the model without trust_remote_code"
        )
    yield from sequences[0, prompt_len:].tolist()


class _Cancelled(Exception):
    """Raised in the thread of ``generate`` to end it."""


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


def iter_generate_in_thread(
    model: Any, inputs: Mapping[str, torch.Tensor], kwargs: dict[str, Any], seed: int | None
) -> Iterator[int]:
    """Yields the new token ids of one row of ``generate``, which runs in its own thread.

    Args:
        model: a model whose ``generate`` honours a streamer.
        inputs: tensors of one row, by argument name.
        kwargs: other arguments of ``generate``.
        seed: of sampling; None samples from torch's global generator.
    """
    streamer = _QueueStreamer()

    def run() -> None:
        try:
            with torch_seed(seed):
                model.generate(**inputs, streamer=streamer, **kwargs)
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
