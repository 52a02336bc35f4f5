"""A Hugging Face model as a pure function of its weights and its cache."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from model_adapters import attention
from model_adapters.bridge import torch_mode, jax_view, torch_view
from model_adapters.caches import LayerStates, TraceCache

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """The static part of a call: everything here that differs means another compilation.

    Attributes:
        output_hidden_states: return the hidden states of every layer.
        output_attentions: return attention weights; attention then runs as the model's own eager code.
        padded: the batch is padded on the left, so the forward gets an attention mask.
        extra: further keyword arguments of the forward that are not arrays.
    """

    output_hidden_states: bool = False
    output_attentions: bool = False
    padded: bool = False
    extra: tuple[tuple[str, Any], ...] = ()


class ModelProgram:
    """Runs the unmodified forward of `module` as ``forward(weights, states, offset, inputs, spec)``.

    The module is a template: its own tensors are never read, those of `weights` stand in their place.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self.forward_function = type(module).forward
        parameters = inspect.signature(self.forward_function).parameters
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.parameters = frozenset(parameters)
        self.cache_name = next((n for n in ("past_key_values", "cache_params") if n in parameters), None)
        self.output_class: type[ModelOutput] = ModelOutput  # known after the first trace
        self.is_float32 = module.dtype == torch.float32

    def accepts(self, name: str) -> bool:
        """Whether the forward names an argument `name`."""
        return name in self.parameters

    def forward(
        self,
        weights: Mapping[str, jax.Array],
        states: LayerStates | None,
        offset: jax.Array | None,
        inputs: Arrays,
        spec: CallSpec,
    ) -> tuple[Arrays, LayerStates | None]:
        """One forward, to be traced.

        Args:
            weights: every tensor of the module by qualified name.
            states: cache layers (`DeviceCache.states`), or None for a forward without a cache.
            offset: int32[], tokens already stored in the cache.
            inputs: arrays by the forward's argument names. ``starts`` int32[batch] stands for left padding: the
                attention mask is made of it. ``last`` int32[] asks for the logits of that one position.
            spec: what is static.

        Returns:
            The fields of the model's output by name, without its cache, and the new cache layers.
        """
        inputs = dict(inputs)
        starts, last = inputs.pop("starts", None), inputs.pop("last", None)
        kwargs = torch_view(inputs)
        query_len = next(x for name, x in inputs.items() if name in ("input_ids", "inputs_embeds")).shape[1]
        cache = None
        if states is not None:
            cache = TraceCache(torch_view(states), None if offset is None else torch_view(offset))
            kwargs[self.cache_name] = cache
        if starts is not None and spec.padded:
            length = query_len if cache is None else cache.get_mask_sizes(query_len, 0)[0]
            kwargs["attention_mask"] = attention.padding_mask(starts, length)
        if self.accepts("use_cache"):
            kwargs["use_cache"] = cache is not None
        keep_one = last is not None and self.accepts("logits_to_keep")
        if keep_one:
            kwargs["logits_to_keep"] = torch_view(last[None])
        for flag in ("output_hidden_states", "output_attentions"):
            if getattr(spec, flag):
                kwargs[flag] = True
        implementation = "eager" if spec.output_attentions else attention.IMPLEMENTATION
        with (
            attention.attention_implementation(self.module, implementation),
            torch_mode(self.module, torch_view(dict(weights))),
            jax.default_matmul_precision("highest") if self.is_float32 else contextlib.nullcontext(),
        ):
            output = self.forward_function(self.module, **kwargs, **dict(spec.extra), return_dict=True)
        self.output_class = type(output)
        fields = {name: jax_view(value) for name, value in output.items() if value is not cache and name != self.cache_name}
        if last is not None and not keep_one:
            fields["logits"] = jax.lax.dynamic_slice_in_dim(fields["logits"], last, 1, axis=1)
        new_states = None if cache is None else jax_view(cache.states())
        return fields, new_states
