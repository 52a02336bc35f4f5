"""Runs a model's forward on JAX for callers that speak torch on the CPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from model_adapters import quirks
from model_adapters.arrays import from_host
from model_adapters.bridge import to_torch_tensor
from model_adapters.caches import DeviceCache
from model_adapters.causality import is_causal
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.packed_weight import PackedWeight, Weights
from model_adapters.program import CONDITIONS, CallSpec, MethodSpec, ModelProgram
from model_adapters.sharding import ModelSharding
from model_adapters.tables import name_in
from torchax_serve.buckets import bucket
from torchax_serve.cache_maker import CacheMaker
from torchax_serve.encoder_beside import EncoderBeside
from torchax_serve.encoder_output import CONTEXT, EncoderOutput
from torchax_serve.images.placeholders import unmet
from torchax_serve.known_inputs import Known, KnownCalls, all_met, arrays_and_rest
from torchax_serve.limits import Limits
from torchax_serve.owner_process import OwnerProcess
from torchax_serve.padding import Padding
from torchax_serve.program_cache import ProgramCache
from torchax_serve.query import Query, cut, pad_positions, pad_tokens
from torchax_serve.steps import Steps

Call = tuple[tuple[Any, Any, dict[str, jax.Array]], CallSpec]
"""Cache, offset and arrays of a step, and what is static of it."""


class Runtime:
    """One model on JAX, or a `part` of it: its weights there, its program, its compiled steps."""

    def __init__(
        self,
        module: PreTrainedModel,
        weights: Weights,
        programs: ProgramCache | None = None,
        sharding: ModelSharding | None = None,
        part: str = "",
    ) -> None:
        self.program = ModelProgram(module, sharding, part)
        called = self.program.called
        self.weights = weights if part and isinstance(weights, dict) else dict(weights)
        self.program.sizes = _sizes(self.weights)
        self.steps = Steps(self.program, programs or ProgramCache())
        self.config = getattr(called, "config", module.config)  # a part need not have one of its own
        has_encoder = self.program.names.has_encoder
        self._encoder = name_in(module, called.get_encoder()) if has_encoder else None
        self._decoder = called.get_decoder() if has_encoder else called  # whose layers are those that the cache has
        self.text_config = getattr(self._decoder, "config", self.config).get_text_config(decoder=True)
        self.caches = CacheMaker(self.steps, self.weights, self.config, self.text_config)
        # A part's file has its decoder, too; and a head that reads the last token would read what is padded.
        has_token_outputs = called is module and (module.can_generate() or module.base_model is module)
        self.is_causal = not has_encoder and has_token_outputs and is_causal(called)
        self.unread = quirks.unread(called)
        self._parts: dict[str, Runtime] = {}
        self.process = OwnerProcess()
        self._known = KnownCalls(self.program.names.sequence, self.steps.cache, self.weights)

    @functools.cached_property
    def limits(self) -> Limits:
        """What tokens the model can be given."""
        return Limits.of(self._decoder, (self.program.called, self.program.module), self.text_config)

    @functools.cached_property
    def encoder(self) -> EncoderBeside | None:
        """The encoder beside the decoder; None where there is none among the model's parts."""
        return None if self._encoder is None else EncoderBeside(self.program, self.part(self._encoder))

    def part(self, name: str) -> Runtime:
        """The part `name` of the model, such as its encoder, over the same weights; "" is the model itself."""
        if not name:
            return self
        if name not in self._parts:
            made = Runtime(self.program.module, self.weights, self.steps.cache, self.program.sharding, name)
            self._parts[name] = made
        return self._parts[name]

    def padded_len(self, length: int, past: int, *, is_kept: bool) -> int:
        """Length a query of `length` tokens is padded to: a rung of the ladder, or the same where padding is seen.

        `is_kept` says that there is a cache: a recurrent state would go on through padding on the right.
        """
        if length == 1 or not self.is_causal or (is_kept and self.caches.is_recurrent):
            return length
        rung = bucket(length)
        # Nor may padding reach behind the end of a table of positions: what is read there is no number.
        fits = self.limits.learned_positions is None or past + rung <= self.limits.learned_positions
        return rung if fits else length

    def forward(self, given: dict[str, Any], spec: CallSpec, cache: Cache | None) -> dict[str, Any]:
        """One forward with torch tensors in and out.

        Args:
            given: tensors by the forward's argument names, on the CPU; ``logits_to_keep`` int.
            spec: flags.
            cache: a `DeviceCache`, updated in place; a cache of transformers, likewise; or None.

        Returns:
            Output fields by name, tensors on the CPU at their true lengths.
        """
        given = dict(given)
        device_cache = None if cache is None else self.caches.on_device(cache)
        fields = self.forward_arrays(given, spec, device_cache)
        if cache is not None and device_cache is not cache:
            assert device_cache is not None
            vars(cache).update(vars(device_cache.to_dynamic()))
        return jax.tree.map(to_torch_tensor, fields)

    def forward_arrays(self, given: dict[str, Any], spec: CallSpec, cache: DeviceCache | None) -> dict[str, Any]:
        """As `forward`, with arrays out, left on the device.

        Raises:
            InvalidArgumentError: values that the model's code has checked are not as it needs them.
        """
        self.process.check()
        fields = self._forward_arrays(given, spec, cache)
        _check(fields.pop(CONDITIONS, None), given, self.config)
        return fields

    def _forward_arrays(self, given: dict[str, Any], spec: CallSpec, cache: DeviceCache | None) -> dict[str, Any]:
        given = {key: value for key, value in given.items() if key not in self.unread}
        names = self.program.names
        name = names.ids if given.get(names.ids) is not None else names.embeds
        exact = bool(set(given) - names.sequence - {"logits_to_keep"}) or given.get(name) is None
        if cache is None and (exact or names.has_encoder):
            return self.forward_as_is(given, spec)
        tensor = given.pop(name)
        if name == names.ids:
            self.limits.check_ids(tensor)
        # What padding computes is garbage, and here it would be looked at.
        exact = exact or spec.output_attentions or spec.output_hidden_states
        length = tensor.shape[1]
        past = 0 if cache is None else cache.length
        query = Query(name, tensor, length if exact else self.padded_len(length, past, is_kept=cache is not None))
        return self._forward_padded(query, given, spec, cache)

    def forward_as_is(self, given: dict[str, Any], spec: CallSpec) -> dict[str, Any]:
        """As `forward_arrays` without a cache, the arguments at the lengths that they have."""

        self.process.check()

        def call(known: Known) -> Call:
            arrays, rest = arrays_and_rest(given, known)
            return (None, None, arrays), dataclasses.replace(spec, extra=spec.extra + rest)

        return self.forward_knowing(given, call)

    def forward_knowing(self, given: dict[str, Any], call: Callable[[Known], Call]) -> dict[str, Any]:
        """A forward without a cache; `call` gives the arguments for what must be known of `given`.

        Raises:
            InvalidArgumentError: values that the model's code has checked are not as it needs them.
        """
        fields, _ = self._known.run(given, call, self.program.forward, self.steps.forward, _conditions)
        _check(fields.pop(CONDITIONS, None), given, self.config)
        return fields

    def _forward_padded(
        self, query: Query, given: dict[str, Any], spec: CallSpec, cache: DeviceCache | None
    ) -> dict[str, Any]:
        past = 0 if cache is None else cache.length
        if cache is not None:
            cache.reserve(bucket(past + query.padded_len))
        keep = given.pop("logits_to_keep", 0)
        states, offset = (None, None) if cache is None else (cache.states, from_host(past, np.int32))

        names = self.program.names
        context = self._context(given, cache) if names.has_encoder and cache is not None else {}

        def call(known: Known) -> Call:
            inputs, padded = self._text_inputs(query, given, cache, known)
            rest_given = {name: value for name, value in given.items() if name not in names.sequence}
            if known >= Known.MASKS:
                rest_given |= {query.name: query.tensor}
                rest_given |= {name: given[name] for name in names.sequence & given.keys()}
            arrays, rest = arrays_and_rest(rest_given, known)
            if keep == 1:
                inputs["last"] = from_host(query.len - 1, np.int32)
            extended = dataclasses.replace(spec, padded=padded, extra=spec.extra + rest)
            return (states, offset, inputs | context | arrays), extended

        described = {**given, query.name: query.tensor}
        fields, states = self._known.run(described, call, self.program.forward, self.steps.forward, _conditions)
        if cache is not None:
            cache.states, cache.length = states, past + query.len
        return cut(fields, query, past, keep, cache)

    def _text_inputs(
        self, query: Query, given: dict[str, Any], cache: DeviceCache | None, known: Known
    ) -> tuple[dict[str, jax.Array], bool]:
        """Tokens, positions and mask as a program takes them, and whether it is told of padding on the left."""
        if known >= Known.MASKS:
            return {}, False
        names, past = self.program.names, 0 if cache is None else cache.length
        inputs = {query.name: pad_tokens(query.tensor, query.padded_len)}
        positions = given.get(names.positions)
        padding = Padding.of(given.get(names.mask), past + query.len)
        length = query.padded_len if cache is None or past == 0 else cache.capacity
        inputs |= padding.inputs(length, names.mask)
        if past and padding.starts is None and padding.mask is None:
            inputs["starts"] = from_host(np.zeros(query.batch), np.int32)  # in case the model cannot do without a mask
            if positions is None and self.program.accepts(names.positions):
                # Without padding every model counts like this; some would do it by a length only the host knows.
                positions = torch.arange(past, past + query.len)[None].expand(query.batch, -1)
        if positions is not None:
            inputs[names.positions] = pad_positions(positions, query.padded_len)
        return inputs, padding.starts is not None

    def method(self, path: str, given: dict[str, Any]) -> Any:
        """A method of a part of the model, compiled, such as the encoder of images by itself.

        Args:
            path: of the method, from the module.
            given: its arguments by name, tensors on the CPU.

        Returns:
            What it returns, with tensors on the CPU.

        Raises:
            InvalidArgumentError: values that the model's code has checked are not as it needs them.
        """

        def call(known: Known) -> tuple[tuple[dict[str, jax.Array]], MethodSpec]:
            arrays, rest = arrays_and_rest(given, known)
            return (arrays,), MethodSpec(path, rest)

        output, met = self._known.run(given, call, self.program.method, self.steps.method, lambda result: result[1])
        _check(met, given, self.config)
        return jax.tree.map(to_torch_tensor, output)

    def _context(self, given: dict[str, Any], cache: DeviceCache) -> dict[str, Any]:
        """Takes an encoder's output and its mask out of `given`, padded; the cache learns their length."""
        output = given.get(CONTEXT[0])
        if not isinstance(output, EncoderOutput):
            output = EncoderOutput.of(given, is_masked=self.encoder is not None and self.encoder.is_masked)
        if output is None:
            return {}
        cache.encoder_len = output.length
        for name in CONTEXT:
            given.pop(name, None)
        return dict(output.arguments)


def _check(met: jax.Array | None, given: dict[str, Any], config: Any) -> None:
    """Raises InvalidArgumentError if conditions on the values of `given` are not met."""
    if not all_met(met):
        raise InvalidArgumentError(unmet(config, given))


def _conditions(result: tuple[dict[str, Any], Any]) -> jax.Array | None:
    """What a forward's result says of its conditions."""
    return result[0].get(CONDITIONS)


def _sizes(weights: Weights) -> dict[str, int]:
    """The values of single whole numbers among `weights`, where they are on this host."""
    arrays = {name: array for name, array in weights.items() if not isinstance(array, PackedWeight)}
    scalars = {name: array for name, array in arrays.items() if array.ndim == 0 and array.dtype.kind == "i"}
    return {name: int(array) for name, array in scalars.items() if getattr(array, "is_fully_addressable", False)}
