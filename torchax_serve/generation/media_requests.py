"""Prompts with images or audio as requests of the engine, in a batch with those of others.

transformers prepares and checks them, as for ``generate``. The encoders run here, once; the engine computes the prompt.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationConfig

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.executors.request_input import MediaInput
from torchax_serve.generation.call_limits import CallLimits, draw_seed
from torchax_serve.generation.engine_rows import encoded_request, read_tokens
from torchax_serve.generation.sample_call import StaticBatchStart, static_batch_start
from torchax_serve.generation.single_request import loop_options, prepared_call
from torchax_serve.multimodal.decode_inputs import PreparedSteps
from torchax_serve.multimodal.encoder_programs import encoders_run_by
from torchax_serve.request_params import ENGINE_OPTIONS, RequestParams, unsupported_options
from torchax_serve.runtime.media_encoder import MediaEncoder, MediaFeatures, digest_of, page_ids
from torchax_serve.sampling_params import NO_PARAMS, SamplingParams
from torchax_serve.scheduler import Request
from torchax_serve.scheduler.request import TokenIds

if TYPE_CHECKING:
    from torchax_serve.engine.data_parallel import DataParallelEngines
    from torchax_serve.engine.engine import Engine
    from torchax_serve.runtime.model_runtime import ModelRuntime

TOKEN_TYPES = frozenset({"token_type_ids", "mm_token_type_ids"})
"""Arguments of later steps that say that their token is text, as a step of the engine takes it to be."""


def media_request(
    model: Any,
    get_engine: Callable[[], Engine | DataParallelEngines],
    inputs: Mapping[str, Any],
    config: GenerationConfig,
    params: SamplingParams | None,
    seed: int | None,
) -> Request | str:
    """Returns the request of a prompt with media, or why the engine does not take it.

    Args:
        model: What `torchax_serve.generation.jax_model.run_on_jax` returned.
        get_engine: Returns the engine, which is made for the first request that it can take.
        inputs: All tensors of the prompt by argument of ``generate``.
        config: Limits and options of decoding.
        params: Options that only the engine honours.
        seed: Seed of sampling; None: one from torch's global generator.

    Raises:
        InvalidArgumentError: placeholders and features do not fit each other, or an image is longer than what fits.
    """
    runtime: ModelRuntime = model._jax_runtime
    config = copy.deepcopy(config)
    config.use_cache = True  # the engine has one; without it tokens are the same, of every sequence anew
    if runtime.encoder is not None:
        return encoded_request(model, get_engine, inputs, config, params, seed)
    encoder = encoder_of(runtime)
    if (reason := _unsupported_reason(runtime, encoder, inputs)) is not None:
        return reason
    with encoders_run_by(encoder.run_encoder):
        call = prepared_call(model, inputs, config)
    if call is None:
        return "its generate does more than it prepares for the loop over tokens"
    start = static_batch_start(runtime, call)
    if not isinstance(start, StaticBatchStart):
        return start
    max_length = call.stopping_criteria.max_length
    if max_length is None or (unsupported := unsupported_options(call.config, ENGINE_OPTIONS)):
        return "it has no limit of tokens" if max_length is None else f"{', '.join(unsupported)} is set"
    prepared = start.prepared
    if prepared is None or {name for name, _ in prepared.constants} - TOKEN_TYPES:
        return "every step gets more than tokens and positions"
    try:
        engine = get_engine()
        _check_len(call.input_ids.shape[1], engine)
        media = _encoded(encoder, prepared, call.input_ids, inputs)
    except UnsupportedModelError as error:
        return str(error)
    if media.sees_until is not None and (reason := _span_reason(media, engine)) is not None:
        return reason
    seed = draw_seed(seed, do_sample=call.config.do_sample)
    options = loop_options(call.config, max_length, len(media.prompt_ids))
    own = RequestParams.of_generation_config(options, params or NO_PARAMS, seed=seed)
    return Request.of(TokenIds(media.prompt_ids), own, request_input=media, page_ids=media.page_ids, spans=media.spans)


def _span_reason(media: MediaInput, engine: Engine | DataParallelEngines) -> str | None:
    """Returns why the engine does not take tokens that see later ones; None if it does.

    Raises:
        InvalidArgumentError: an image is longer than what fits.
    """
    limits = engine.span_limits
    if not limits.sees_ahead:
        return "tokens of an image see each other, which forwards per request do not know"
    longest = max(end - begin for begin, end in media.spans)
    if longest > (limits.shortest_window or longest):
        return "an image is longer than a layer's window, which its tokens see beyond"
    if longest > limits.max_len and _text_sees_ahead(media):
        return "tokens of its text see later ones, and they are more than one step has room for"
    _check_span(longest, limits.max_len)
    return None


def media_answers(
    model: Any,
    get_engine: Callable[[], Engine | DataParallelEngines],
    prompts: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    limits: CallLimits,
) -> list[list[int]] | None:
    """Returns new tokens of prompts with media, which share the engine's steps.

    None if the engine does not take them all.

    Args:
        model: What `torchax_serve.generation.jax_model.run_on_jax` returned.
        get_engine: Returns the engine.
        prompts: All tensors of each prompt by argument of ``generate``.
        options: Options of ``generate``.
        limits: Limits of the call.
    """
    config = copy.deepcopy(model.generation_config)
    if config.update(**options):
        return None  # what only ``generate`` knows, or refuses
    requests = []
    for inputs in prompts:
        seed = draw_seed(do_sample=config.do_sample)
        found = media_request(model, get_engine, inputs, config, limits.params(), seed)
        if not isinstance(found, Request):
            return None
        requests.append(found)
    handles = get_engine().submit_all(requests)
    with limits.cancelling(handles):
        return [read_tokens(handle, limits)[0] for handle in handles]


def encoder_of(runtime: ModelRuntime) -> MediaEncoder:
    """Returns the encoders of a model's images and audio."""
    if runtime.media_encoder is None:
        runtime.media_encoder = MediaEncoder(runtime)
    found: MediaEncoder = runtime.media_encoder
    return found


def _unsupported_reason(runtime: ModelRuntime, encoder: MediaEncoder, inputs: Mapping[str, Any]) -> str | None:
    """Returns why the engine does not take a prompt, as far as is known before it is prepared."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != 1:
        return "there are no token ids of one row"
    mask = inputs.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        return "tokens of the prompt are masked"
    if runtime.why_stepwise is not None:
        return runtime.why_stepwise
    if runtime.steps.executables.launcher is not None:
        return "images and audio do not run on several hosts"
    return encoder.unsupported_reason


def _encoded(
    encoder: MediaEncoder, prepared: PreparedSteps, input_ids: torch.Tensor, inputs: Mapping[str, Any]
) -> MediaInput:
    """Returns a prompt with its features.

    Raises:
        UnsupportedModelError: its positions, or what its language model gets, are not known apart from its forward.
    """
    ids = input_ids[0].numpy()
    digest = digest_of(inputs)
    found = encoder.encode(ids, prepared.first, digest)
    positions, delta = _positions(prepared, len(ids))
    numbers = np.cumsum(found.is_media) - 1
    media = MediaInput(
        prompt_ids=tuple(ids.tolist()),
        features=found.features,
        index=np.where(found.is_media, numbers, -1).astype(np.int32),
        positions=positions,
        delta=delta,
        sees_until=_with_own(found, len(ids)),
        page_ids=(),
    )
    is_named = found.is_media
    if positions is not None and not _text_counts_on(positions, is_named):
        digest = f"{digest} {positions.tobytes().hex()}"
    if _text_sees_ahead(media):  # what a page holds depends on the text behind it, which its tokens see
        digest, is_named = f"{digest} {ids.tobytes().hex()}", np.ones_like(is_named)
    return dataclasses.replace(media, page_ids=page_ids(ids, is_named, digest, positions))


def _text_counts_on(positions: np.ndarray, is_media: np.ndarray) -> bool:
    """Returns whether each token of text stands one behind the furthest in front, on all axes.

    Then its position follows from the tokens in front, and a page with it needs no other name.

    Args:
        positions: int32[axes, len].
        is_media: bool[len], tokens with a feature.
    """
    own = np.arange(positions.shape[1])
    axes = positions[(positions != own).any(1)]  # another axis may count all tokens
    if not len(axes):
        return True
    furthest = np.maximum.accumulate(axes.max(0))
    expected = np.concatenate([[0], furthest[:-1] + 1])
    return bool((axes == expected)[:, ~is_media].all())


def _text_sees_ahead(media: MediaInput) -> bool:
    """Returns whether tokens without features see later ones, as the whole prompt of PaliGemma."""
    if media.sees_until is None:
        return False
    is_ahead = media.sees_until > np.arange(len(media.sees_until))
    return bool(is_ahead[media.index < 0].any())


def _with_own(found: MediaFeatures, length: int) -> np.ndarray | None:
    return None if found.sees_until is None else np.maximum(found.sees_until, np.arange(length, dtype=np.int32))


def _positions(prepared: PreparedSteps, length: int) -> tuple[np.ndarray | None, int]:
    """Returns a prompt's positions, int32[axes, len] or None for text, and their delta.

    Raises:
        UnsupportedModelError: later tokens have other positions on each axis.
    """
    after, first = prepared.position_ids, prepared.first.get("position_ids")
    if after is None:
        if first is not None:
            raise UnsupportedModelError("tokens behind the prompt have no positions, and its own have")
        return None, 0
    next_ones = np.unique(after.reshape(-1, 1).numpy()[-3:]).astype(int)  # a first axis may have those of text
    if len(next_ones) != 1:
        raise UnsupportedModelError("tokens behind the prompt have other positions on each axis")
    delta = int(next_ones[0]) - length
    if first is None:
        if delta:
            raise UnsupportedModelError("tokens behind the prompt have positions that its own have not")
        return None, 0
    given = first.reshape(-1, length).numpy().astype(np.int32)
    is_text = first.ndim == 2 and len(given) == 1 and (given[0] == np.arange(length)).all()
    return (None if is_text else given), delta


def _check_len(prompt_len: int, engine: Engine | DataParallelEngines) -> None:
    """Raises InvalidArgumentError for a prompt that never fits, before its images are encoded."""
    if prompt_len >= engine.max_model_len:
        raise InvalidArgumentError(
            f"expected a prompt of at most {engine.max_model_len - 1} tokens, its images among them, got {prompt_len}; "
            "send fewer or smaller images, or raise EngineOptions(max_model_len=...)"
        )


def _check_span(longest: int, max_len: int) -> None:
    """Raises InvalidArgumentError for an image of `longest` tokens that no step has room for."""
    if longest > max_len:
        raise InvalidArgumentError(
            f"expected an image of at most {max_len} tokens, which see each other and so are computed in "
            f"one step, got one of {longest}; raise EngineOptions(max_num_batched_tokens=...), or send a smaller image"
        )
