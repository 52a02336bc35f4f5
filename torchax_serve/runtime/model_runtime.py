"""Runs a model's forward on JAX for callers that speak torch on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from model_adapters import quirks
from model_adapters.bridge.views import named_tensors, to_torch_tensor
from model_adapters.caches.device_cache import DeviceCache
from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError
from model_adapters.lora.stacks import LoraStacks
from model_adapters.ops.compressed_weight import Stored, Weights
from model_adapters.program import recurrent_functions
from model_adapters.program.call_signature import TensorOutput
from model_adapters.program.embeddings import submodule_name
from model_adapters.program.model_program import CHECKS, INDICES, CallSpec, MethodSpec, ModelProgram
from model_adapters.program.module_watch import PREPARES, Change, ModuleWatch, Structure
from model_adapters.program.padding_safety import right_padding_is_safe
from model_adapters.program.position_limits import has_table_of_distances
from model_adapters.sharding.model_sharding import ModelSharding
from torchax_serve.buckets import next_bucket
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.multimodal.placeholders import unmet
from torchax_serve.runtime.call_arguments import check_positions_kept
from torchax_serve.runtime.call_inputs import program_inputs, take_encoder_output
from torchax_serve.runtime.capabilities import CacheSupport
from torchax_serve.runtime.encoder import EncoderRuntime
from torchax_serve.runtime.input_limits import InputLimits
from torchax_serve.runtime.module_changes import check_can_follow, weights_of
from torchax_serve.runtime.padding import FurtherLogits, NewTokenBatch, cut, is_own_mask
from torchax_serve.runtime.static_args import StaticArgPolicy, StaticArgs, all_hold, split_traced_and_static
from torchax_serve.runtime.step_functions import StepFunctions
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour, installed_rules
from torchax_serve.validation.owner_process import OwnerProcess

NUM_EARLIER = 4
"""Structures of a model whose programs are kept: with an adapter and without it, and some more."""
_OF_ALL_STRUCTURES = frozenset(
    {"weights", "weights_version", "lora", "watch", "num_changes", "last_change", "_earlier", "_lock"}
)
Call = tuple[tuple[Any, Any, dict[str, jax.Array]], CallSpec]
"""Cache, offset and arrays of a step, and what is static of it."""


class ModelRuntime:
    """A model or submodule on JAX: its weights, its program, its compiled steps.

    Attributes:
        lora: Matrices of the adapters that requests can name; None if they can name none.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        weights: Weights,
        programs: ExecutableCache | None = None,
        sharding: ModelSharding | None = None,
        part: str = "",
        watch: ModuleWatch | None = None,
    ) -> None:
        self.weights = weights if part and isinstance(weights, dict) else dict(weights)
        recurrent_functions.install(module)
        self.watch = watch or ModuleWatch(module)
        self.weights_version = self.num_changes = 0
        self.last_change = ""
        self.lora: LoraStacks | None = None
        self._earlier: list[tuple[Structure, dict[str, Any]]] = []
        self._lock = threading.Lock()
        self._set_up(ModelProgram(module, sharding, part, self.watch), programs or ExecutableCache())

    @property
    def sampling_rules(self) -> TransformersBehaviour:
        """Release of transformers whose processors are followed: the installed one."""
        return installed_rules()

    def _set_up(self, program: ModelProgram, programs: ExecutableCache) -> None:
        """Makes all that depends on the module's structure."""
        module = program.module
        self.program, called = program, program.target
        self.program.static_scalars = _sizes(self.weights)
        self.steps = StepFunctions(self.program, programs)
        self.config = getattr(called, "config", module.config)  # a part need not have one of its own
        has_encoder = self.program.names.has_encoder
        self._encoder = submodule_name(module, called.get_encoder()) if has_encoder else None
        self._decoder = called.get_decoder() if has_encoder else called  # whose layers are those that the cache has
        self.text_config = getattr(self._decoder, "config", self.config).get_text_config(decoder=True)
        self.cache_support = CacheSupport(self.steps, self.weights, self.config, self.text_config)
        # A part's file has its decoder, too; and a head that reads the last token would read what is padded.
        has_token_outputs = called is module and (module.can_generate() or module.base_model is module)
        self.is_causal = not has_encoder and has_token_outputs and right_padding_is_safe(called)
        # What generates has to be a program: the code that keeps it from being one is said instead.
        is_one_call = program.sharding is None and not module.can_generate()
        self._code = getattr(type(called), "_torch_class", type(called)).__module__ if is_one_call else None
        self._further_logits = FurtherLogits(module)
        self.ignored_args = quirks.of(called).ignored_arguments
        self._parts: dict[str, ModelRuntime] = {}
        self.media_encoder: Any = None  # made for the first prompt with images or audio on the engine
        self.process = OwnerProcess()
        self._known = StaticArgPolicy(self.program.names.per_token_args, self.steps.executables, self.weights)

    def follow_module(self) -> None:
        """Takes over what has changed on the module since its programs and arrays were made.

        Other values are read anew; other parts, hooks, attributes or settings mean other programs. Those of the last
        few states are kept, so that an adapter may be switched on and off.

        Raises:
            InvalidArgumentError: the module has become something that cannot run here; it stays so until mended.
        """
        if (change := self.watch.change()) is None:
            return
        with self._lock:
            if (change := self.watch.change()) is None:  # another thread has been here
                return
            check_can_follow(self.program, self.weights, change)
            before, new = self.watch.structure, weights_of(self.program.module, self.weights, change)
            self.watch.take()
            self.num_changes += 1
            self.last_change = change.what
            for name in self.weights.keys() - new.keys():
                del self.weights[name]
            self.weights.update(new)  # the same dict for all that read it
            if change.is_structural:
                self._change_structure(before)
            self.program.static_scalars = _sizes(self.weights)

    def refresh(self) -> None:
        """Makes programs and arrays anew, as if every tensor and every part had changed."""
        with self._lock:
            module = self.program.module
            change = Change("refresh", frozenset(n for n, t in named_tensors(module).items() if not t.is_meta), True)
            check_can_follow(self.program, self.weights, change)
            self.weights.update(weights_of(module, self.weights, change))
            self.watch.take()
            self.num_changes += 1
            self._earlier.clear()
            self._change_structure(None)

    def _change_structure(self, before: Structure | None) -> None:
        """Stores the state of the structure `before`; restores or makes that of the present one."""
        if before is not None:
            state = {name: value for name, value in vars(self).items() if name not in _OF_ALL_STRUCTURES}
            self._earlier = [*self._earlier, (before, state)][-NUM_EARLIER:]
        for name in ("limits", "encoder"):
            vars(self).pop(name, None)
        for index, (structure, state) in enumerate(self._earlier):
            if structure == self.watch.structure:
                vars(self).update(state)
                del self._earlier[index]
                return
        module, sharding, part = self.program.module, self.program.sharding, self.program.submodule
        self._set_up(ModelProgram(module, sharding, part, self.watch), ExecutableCache())  # its code is not the files'

    def with_module(self) -> ModelRuntime:
        """Returns itself; of a stored model the runtime with the module."""
        return self

    @property
    def why_stepwise(self) -> str | None:
        """Reason why each token needs a call of the model itself, such as hooks; None: no need."""
        if self.watch.hooked:
            return f"a forward hook is set on {self.watch.hooked[0]}"
        if PREPARES in vars(self.program.module):  # such as by peft, for prompts that it has learned
            return f"another {PREPARES} is set on the model"
        return "a forward hook or another forward is set on the model" if self.watch.is_wrapped else None

    @functools.cached_property
    def limits(self) -> InputLimits:
        """Limits of the tokens that the model accepts."""
        return InputLimits.of(self._decoder, (self.program.target, self.program.module), self.text_config)

    @functools.cached_property
    def encoder(self) -> EncoderRuntime[ModelRuntime] | None:
        """Encoder among the model's parts, next to the decoder; None if there is none."""
        return None if self._encoder is None else EncoderRuntime(self.program, self.submodule(self._encoder))

    def submodule(self, name: str) -> ModelRuntime:
        """Returns the submodule `name` with the same weights; "" is the model itself."""
        if not name:
            return self
        if name not in self._parts:
            program = self.program
            made = ModelRuntime(
                program.module, self.weights, self.steps.executables, program.sharding, name, self.watch
            )
            self._parts[name] = made
        return self._parts[name]

    def padded_len(self, length: int, past: int, *, is_kept: bool) -> int:
        """Returns the bucket of `length` tokens; `length` if padding would change results.

        `is_kept` says that there is a cache: padding on the right would advance a recurrent state.
        """
        if length == 1 or not self.is_causal or self.watch.hooked or (is_kept and self.cache_support.is_recurrent):
            return length  # a hook would see padding
        bucket = next_bucket(length)
        # Nor may padding reach behind the end of a table of positions: what is read there is no number.
        fits = self.limits.learned_positions is None or past + bucket <= self.limits.learned_positions
        return bucket if fits else length

    def forward(self, given: dict[str, Any], spec: CallSpec, cache: Cache | None) -> dict[str, Any]:
        """Runs one forward, torch tensors in and out.

        Args:
            given: CPU tensors by argument name; ``logits_to_keep`` is an int.
            spec: Static arguments of the call.
            cache: `DeviceCache` or transformers cache, updated in place; None for none.

        Returns:
            Output fields by name, tensors on the CPU at their true lengths.
        """
        given = dict(given)
        device_cache = None if cache is None else self.cache_support.to_device(cache)
        fields = self.forward_arrays(given, spec, device_cache)
        if cache is not None and device_cache is not cache:
            assert device_cache is not None
            vars(cache).update(vars(device_cache.to_dynamic()))
        return jax.tree.map(to_torch_tensor, fields)

    def forward_arrays(self, given: dict[str, Any], spec: CallSpec, cache: DeviceCache | None) -> dict[str, Any]:
        """Runs the forward as `forward`, with results as arrays on the device.

        Raises:
            InvalidArgumentError: a deferred check of the model's code failed.
        """
        self.process.check()
        past = 0 if cache is None else cache.length
        fields = self._forward_arrays(given, spec, cache)
        _check(fields.pop(CHECKS, None), given, self.config)
        self._check_indices(fields.pop(INDICES, None), given, spec, cache, past)
        return fields

    def _check_indices(
        self, in_range: jax.Array | None, given: dict[str, Any], spec: CallSpec, cache: DeviceCache | None, past: int
    ) -> None:
        """Raises InvalidArgumentError if a finished call read beyond the end of a table.

        Padding may have: the call is made again at its true length, operator by operator, where a table has its name.
        """
        if all_hold(in_range):
            return
        error = InvalidArgumentError(
            "expected token ids, positions and token types that the model's tables have, got some beyond them; give "
            "fewer tokens or smaller values"
        )
        if self.program.sharding is not None:
            raise error
        try:
            (states, offset, arrays), exact = self._exact_call(given, spec, cache, past)
            self.program.forward(self.weights, states, offset, arrays, exact)
        except InvalidArgumentError:
            if cache is not None:
                cache.length = past
            raise
        except Exception as other:  # whatever model code raises of values that it has not seen so far
            raise error from other

    def _exact_call(self, given: dict[str, Any], spec: CallSpec, cache: DeviceCache | None, past: int) -> Call:
        """Returns a call of the program without padding, over a cache with `past` tokens."""
        given = {key: value for key, value in given.items() if key not in self.ignored_args}
        name = self.program.names.ids if given.get(self.program.names.ids) is not None else self.program.names.embeds
        if cache is None or given.get(name) is None:
            arrays, rest = split_traced_and_static(given)
            return (None, None, arrays), dataclasses.replace(spec, static_args=spec.static_args + rest)
        tensor = given.pop(name)
        after, cache.length = cache.length, past
        try:
            inputs, extended = program_inputs(
                self.program,
                NewTokenBatch(name, tensor, tensor.shape[1]),
                given,
                spec,
                cache,
                StaticArgs.NOTHING,
            )
            return (cache.states, to_device(past, np.int32), inputs), extended
        finally:
            cache.length = after

    def _forward_arrays(self, given: dict[str, Any], spec: CallSpec, cache: DeviceCache | None) -> dict[str, Any]:
        given = {key: value for key, value in given.items() if key not in self.ignored_args}
        names = self.program.names
        name = names.ids if given.get(names.ids) is not None else names.embeds
        exact = bool(set(given) - names.per_token_args - {"logits_to_keep"}) or given.get(name) is None
        exact = exact or (cache is None and is_own_mask(given.get(names.mask)))
        if given.get(name) is not None and has_table_of_distances(self.text_config):
            self.limits.check_positions(given[name].shape[1] + (0 if cache is None else cache.length))
        if cache is None and (exact or names.has_encoder):
            return self.forward_unpadded(given, spec)
        past, length = 0 if cache is None else cache.length, given[name].shape[1]
        if cache is not None:
            cache.reserve(next_bucket(past + length))
        exact = exact or self._further_logits.come(
            given, lambda: self._exact_call(given, spec, cache, past), self.program, self.weights
        )
        tensor = given.pop(name)
        if name == names.ids:
            self.limits.check_ids(tensor)
        # What padding computes is garbage, and here it would be looked at.
        returns_routes = getattr(self.text_config, "output_router_logits", False)
        exact = exact or spec.output_attentions or spec.output_hidden_states or returns_routes
        if (keep := check_positions_kept(given.pop("logits_to_keep", 0), length)) is not None:
            given["logits_to_keep"] = keep
        # Who brings positions to keep or a mask of queries and keys means them at the length that they have.
        exact = exact or isinstance(keep, torch.Tensor) or is_own_mask(given.get(names.mask))
        query = NewTokenBatch(
            name, tensor, length if exact else self.padded_len(length, past, is_kept=cache is not None)
        )
        fields = self._forward_padded(query, given, spec, cache)
        if query.padded_len != length and self.program.output_class is TensorOutput:  # none of whose axes is known
            return self._forward_padded(NewTokenBatch(name, tensor, length), given, spec, cache)
        return fields

    def forward_unpadded(self, given: dict[str, Any], spec: CallSpec) -> dict[str, Any]:
        """Runs `forward_arrays` without a cache and without padding of the arguments."""

        self.process.check()

        def call(known: StaticArgs) -> Call:
            arrays, rest = split_traced_and_static(given, known)
            return (None, None, arrays), dataclasses.replace(spec, static_args=spec.static_args + rest)

        return self.forward_with_static_args(given, call)

    def forward_varlen(self, arrays: Mapping[str, np.ndarray], cu_seqlens: np.ndarray) -> dict[str, Any]:
        """Runs a forward of texts in one row; see `model_adapters.program.varlen_forward`.

        Raises:
            NotPackableError: the model's code does not let texts stand in one row.
        """
        self.process.check()
        given = {name: to_device(array, np.int32) for name, array in arrays.items()}
        fields: dict[str, Any] = self.steps.varlen(self.weights, given, to_device(cu_seqlens, np.int32), spec=None)
        described = {name: torch.from_numpy(array[None]) for name, array in arrays.items()}
        self._check_indices(fields.pop(INDICES, None), described, CallSpec(), None, 0)
        return fields

    def forward_with_static_args(self, given: dict[str, Any], call: Callable[[StaticArgs], Call]) -> dict[str, Any]:
        """Runs a forward without a cache; `call` returns its arguments for a choice of static ones.

        Raises:
            InvalidArgumentError: a deferred check of the model's code failed.
        """
        forward, step = self.program.forward, self.steps.forward
        fields, _ = self._known.run(given, call, forward, step, _conditions, code=self._code)
        _check(fields.pop(CHECKS, None), given, self.config)
        self._check_indices(fields.pop(INDICES, None), given, CallSpec(), None, 0)
        return fields

    def _forward_padded(
        self, query: NewTokenBatch, given: dict[str, Any], spec: CallSpec, cache: DeviceCache | None
    ) -> dict[str, Any]:
        past = 0 if cache is None else cache.length
        if cache is not None:
            cache.reserve(next_bucket(past + query.padded_len))
        keep = given.get("logits_to_keep", 0)
        states, offset = (None, None) if cache is None else (cache.states, to_device(past, np.int32))

        names = self.program.names
        context = take_encoder_output(self.encoder, given, cache) if names.has_encoder and cache is not None else {}

        def call(known: StaticArgs) -> Call:
            inputs, extended = program_inputs(self.program, query, given, spec, cache, known)
            return (states, offset, inputs | context), extended

        described = {**given, query.name: query.tensor}
        forward, step = self.program.forward, self.steps.forward
        fields, states = self._known.run(described, call, forward, step, _conditions, code=self._code)
        if cache is not None:
            cache.states, cache.length = states, past + query.len
        return cut(fields, query, past, keep, cache)

    def call_method(self, path: str, given: dict[str, Any]) -> Any:
        """Runs a compiled method of a submodule, such as an image encoder.

        Args:
            path: Dotted path of the method from the module.
            given: Arguments by name, tensors on the CPU.

        Returns:
            The method's result, with tensors on the CPU.

        Raises:
            InvalidArgumentError: a deferred check of the model's code failed.
        """

        def call(known: StaticArgs) -> tuple[tuple[dict[str, jax.Array]], MethodSpec]:
            arrays, rest = split_traced_and_static(given, known)
            return (arrays,), MethodSpec(path, rest)

        output, met = self._known.run(
            given, call, self.program.method, self.steps.call_method, lambda result: result[1]
        )
        _check(met, given, self.config)
        return jax.tree.map(to_torch_tensor, output)


def _check(met: jax.Array | None, given: dict[str, Any], config: Any) -> None:
    """Raises InvalidArgumentError if conditions on the values of `given` are not met."""
    if not all_hold(met):
        raise InvalidArgumentError(unmet(config, given))


def _conditions(result: tuple[dict[str, Any], Any]) -> jax.Array | None:
    """Returns the deferred checks in the result of a forward."""
    return result[0].get(CHECKS)


def _sizes(weights: Weights) -> dict[str, int]:
    """Returns the values of integer scalars among `weights` that are on this host."""
    arrays = {name: array for name, array in weights.items() if not isinstance(array, Stored)}
    scalars = {name: array for name, array in arrays.items() if array.ndim == 0 and array.dtype.kind == "i"}
    return {name: int(array) for name, array in scalars.items() if getattr(array, "is_fully_addressable", False)}
