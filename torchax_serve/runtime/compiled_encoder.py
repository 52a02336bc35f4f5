"""Runs the encoder of an encoder-decoder model once per input, compiled for a few lengths."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import torch
from transformers.utils import ModelOutput

from model_adapters.bridge.views import to_jax_array, to_torch_tensor
from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.program.model_program import CallSpec
from model_adapters.program.padding_safety import masked_tokens_are_ignored
from torchax_serve.buckets import next_bucket
from torchax_serve.runtime.model_runtime import Call, ModelRuntime
from torchax_serve.runtime.static_args import StaticArgs, split_traced_and_static

SEQUENCE = frozenset({"input_ids", "inputs_embeds", "attention_mask", "token_type_ids"})
FLAGS = ("output_hidden_states", "output_attentions")


class CompiledEncoder:
    """Replaces the encoder in ``generate``: runs it compiled, forwards every other attribute.

    Raises:
        UnsupportedModelError: the encoder is none of the model's parts.
    """

    def __init__(self, runtime: ModelRuntime, encoder: torch.nn.Module) -> None:
        module = runtime.program.module
        found = (name for name, child in module.named_modules() if child is encoder)
        name = next(found, None) if runtime.encoder is None else runtime.encoder.name
        if name is None:
            raise UnsupportedModelError(
                f"expected an encoder that is a part of {type(module).__name__}, got {type(encoder).__name__}"
            )
        self._encoder = encoder
        self._runtime = runtime.submodule(name)
        self.forward = encoder.forward  # for its signature, which transformers reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def __call__(self, *args: Any, **kwargs: Any) -> ModelOutput | tuple[Any, ...]:
        """Runs the encoder's forward, torch tensors in and out."""
        given = dict(inspect.signature(self.forward).bind(*args, **kwargs).arguments)
        rest = [n for n, p in inspect.signature(self.forward).parameters.items() if p.kind is p.VAR_KEYWORD]
        for name in rest:
            given.update(given.pop(name, {}))
        given = {name: value for name, value in given.items() if value is not None}
        return_dict = given.pop("return_dict", True)
        hidden, attentions = (bool(given.pop(flag, getattr(self._runtime.config, flag, False))) for flag in FLAGS)
        spec = CallSpec(output_hidden_states=hidden, output_attentions=attentions)
        fields = encode(self._runtime, given, spec)
        output = self._runtime.program.output_class(**fields)
        return output if return_dict else output.to_tuple()


def encode(runtime: ModelRuntime, given: dict[str, Any], spec: CallSpec) -> dict[str, Any]:
    """Runs one forward of an encoder.

    Token ids are padded to a bucket if the encoder ignores masked positions; other inputs run at their length.

    Args:
        runtime: Runtime of the encoder, or of a model that is one.
        given: Tensors by argument name.
        spec: Static arguments of the call.

    Returns:
        Output fields by name, tensors on the CPU at their true lengths.

    Raises:
        InvalidArgumentError: an input is empty or too long, or ids are out of range.
    """
    _check(runtime, given)
    ids = given.get("input_ids")
    fixed = set(given) - SEQUENCE or ids is None or any(given.get(n) is None for n in ("input_ids", "attention_mask"))
    if (
        fixed
        or spec.output_attentions
        or spec.output_hidden_states
        or not masked_tokens_are_ignored(runtime.program.target)
    ):
        return runtime.forward(given, spec, None)
    assert ids is not None
    length = ids.shape[1]
    padded_len = next_bucket(length) if runtime.program.rope is None else length  # whose frequencies depend on it
    if runtime.limits.learned_positions is not None:
        padded_len = max(length, min(padded_len, runtime.limits.learned_positions))

    def call(known: StaticArgs) -> Call:
        if known is StaticArgs.NOTHING:
            return (None, None, {name: padded(tensor, padded_len) for name, tensor in given.items()}), spec
        arrays, rest = split_traced_and_static(given, known)
        return (None, None, arrays), dataclasses.replace(spec, static_args=spec.static_args + rest)

    fields = runtime.forward_with_static_args(given, call)
    return {name: _cut(value, length, padded_len) for name, value in fields.items()}


def _check(runtime: ModelRuntime, given: dict[str, Any]) -> None:
    for name in ("input_ids", "inputs_embeds", "input_features", "input_values"):
        tensor = given.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 0:
            raise InvalidArgumentError(
                f"{name}: expected an input of at least one token or sample, got one of shape {list(tensor.shape)}; "
                "give one that is not empty"
            )
    if (ids := given.get("input_ids")) is not None and runtime.program.accepts("input_ids"):
        runtime.limits.check_prompt(ids)
        runtime.limits.check_ids(ids)


def padded(tensor: torch.Tensor, length: int) -> Any:
    """Returns `tensor` [batch, len] padded with zeros to `length`, on the device."""
    missing = length - tensor.shape[1]
    if not missing:
        return to_jax_array(tensor)
    return to_device(np.pad(tensor.numpy(), ((0, 0), (0, missing))), np.int32)


def _cut(value: Any, length: int, padded_len: int) -> Any:
    array = to_torch_tensor(value) if value is not None else None
    if array is not None and array.ndim >= 2 and array.shape[1] == padded_len:
        array = array[:, :length]
    return array
