"""Converts arguments of a forward to arrays of the shapes that its program has."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.caches.device_cache import DeviceCache
from model_adapters.device_arrays import to_device
from model_adapters.program.model_program import CallSpec, ModelProgram
from torchax_serve.runtime.encoder import EncoderRuntime
from torchax_serve.runtime.encoder_output import ENCODER_ARGUMENTS, EncoderOutput
from torchax_serve.runtime.padding import NewTokenBatch, Padding, is_own_mask, own_mask, pad_positions, pad_tokens
from torchax_serve.runtime.static_args import StaticArgs, split_traced_and_static


def program_inputs(
    program: ModelProgram,
    query: NewTokenBatch,
    given: dict[str, Any],
    spec: CallSpec,
    cache: DeviceCache | None,
    known: StaticArgs,
) -> tuple[dict[str, Any], CallSpec]:
    """Returns the arrays of a call with the new tokens `query`, and its static part."""
    names = program.names
    given = dict(given)
    keep = given.get("logits_to_keep", 0)
    if not isinstance(keep, torch.Tensor):  # which is an argument as any other
        given.pop("logits_to_keep", None)
    inputs, padded = _text_inputs(program, query, given, cache, known)
    rest_given = {name: value for name, value in given.items() if name not in names.per_token_args}
    if known >= StaticArgs.MASKS:
        rest_given |= {query.name: query.tensor}
        rest_given |= {name: given[name] for name in names.per_token_args & given.keys()}
    arrays, rest = split_traced_and_static(rest_given, known)
    if not isinstance(keep, torch.Tensor) and keep == 1:
        inputs["last"] = to_device(query.len - 1, np.int32)
    return inputs | arrays, dataclasses.replace(spec, left_padded=padded, static_args=spec.static_args + rest)


def _text_inputs(
    program: ModelProgram, query: NewTokenBatch, given: dict[str, Any], cache: DeviceCache | None, known: StaticArgs
) -> tuple[dict[str, jax.Array], bool]:
    """Returns tokens, positions and mask of a program, and whether padding is on the left."""
    if known >= StaticArgs.MASKS:
        return {}, False
    names, past = program.names, 0 if cache is None else cache.length
    inputs = {query.name: pad_tokens(query.tensor, query.padded_len)}
    positions = given.get(names.positions)
    if program.rope is not None and positions is None:  # which the model then counts, padding included
        inputs["rope_lens"] = to_device(past + query.len, np.int32)
    length = query.padded_len if cache is None or past == 0 else cache.capacity
    if is_own_mask(mask := given.get(names.mask)):
        padding = Padding()
        inputs[names.mask] = own_mask(mask, past + query.len, length)
    else:
        padding = Padding.of(mask, past + query.len)
        inputs |= padding.inputs(length, names.mask)
    if past and names.mask not in inputs and padding.starts is None and padding.mask is None:
        inputs["starts"] = to_device(np.zeros(query.batch), np.int32)  # in case the model cannot do without a mask
        if positions is None and program.accepts(names.positions):
            # Without padding every model counts like this; some would do it by a length only the host knows.
            positions = torch.arange(past, past + query.len)[None].expand(query.batch, -1)
    if positions is not None:
        inputs[names.positions] = pad_positions(positions, query.padded_len)
    return inputs, padding.starts is not None


def take_encoder_output(
    encoder: EncoderRuntime[Any] | None, given: dict[str, Any], cache: DeviceCache
) -> dict[str, Any]:
    """Removes the encoder output from `given`; returns it padded, sets its length in the cache."""
    output = given.get(ENCODER_ARGUMENTS[0])
    if not isinstance(output, EncoderOutput):
        output = EncoderOutput.of(given, is_masked=encoder is not None and encoder.is_masked)
    if output is None:
        return {}
    cache.encoder_len = output.length
    for name in ENCODER_ARGUMENTS:
        given.pop(name, None)
    return dict(output.arguments)
