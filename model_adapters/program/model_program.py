"""A Hugging Face model as a pure function of its weights and its cache."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

import pytree_registry
from model_adapters import quirks
from model_adapters.attention import FunctionInterception, attention_name, padding_mask
from model_adapters.bridge.views import as_views, jax_view, torch_mode, torch_view
from model_adapters.caches.device_cache import LayerStates, check_layers_keep_all, shortest_window, trace_cache
from model_adapters.caches.layers import AttentionLayer
from model_adapters.caches.native_cache import generates_as_encoder
from model_adapters.errors import UnsupportedModelError
from model_adapters.jaxpr.split_concats import split_concats
from model_adapters.lowerings import constant_folding, deferred_checks, index_checks, install
from model_adapters.ops.compressed_weight import Weights, substituted
from model_adapters.program import (
    batch_recurrences,
    latent_attention,
    module_scopes,
    moe,
    recurrent_functions,
    rms_norm,
    shared_layers,
)
from model_adapters.program.call_signature import CACHE_NAMES, TensorOutput, cache_name_of, forward_of, signature_of
from model_adapters.program.call_spec import CallSpec as CallSpec
from model_adapters.program.call_spec import MethodSpec as MethodSpec
from model_adapters.program.module_hooks import on_torch_tensors
from model_adapters.program.module_watch import ModuleWatch
from model_adapters.program.rope import LengthDependentRope, lengths_told
from model_adapters.program.static_tensors import StaticTensor, as_tensors, without_constants
from model_adapters.program.trace_context import (
    config_overrides,
    restored_attributes,
    torch_promotion,
    without_memos,
)
from model_adapters.program.trace_mode import ForwardCall, TraceMode, trace_modes
from model_adapters.sharding.model_sharding import ModelSharding

Arrays = dict[str, Any]

# Entry of an output: whether the indices of each lookup were rows of its table, bool[n].
INDICES = "indices"
# Entry of an output: whether each deferred check of the model's code was met, bool[n].
CHECKS = "conditions"


class ModelProgram:
    """Runs the unmodified forward of `module` as a function of weights, states and inputs.

    The function is ``forward(weights, states, offset, inputs, spec)``. The module is a template: its own tensors are
    never read, those of `weights` replace them.

    Args:
        module: The model.
        sharding: Layout of the weights on a mesh; None: on one device, as the model has them.
        part: Name of a submodule, such as the encoder, that is called in place of `module`.
        watch: Notices changes of `module`; None makes one.

    Attributes:
        target: The module that is called: `module` or its submodule.
        names: Names of the forward's arguments.
        rope: Rotary modules whose frequencies depend on a sequence's length; None if there are none.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        sharding: ModelSharding | None = None,
        part: str = "",
        watch: ModuleWatch | None = None,
    ) -> None:
        install.install()
        moe.install()
        recurrent_functions.install(module)
        self.sharding = sharding
        pytree_registry.register_all()  # the modeling file is loaded, with the outputs and caches it defines
        self.module = module
        self.submodule = part
        self.target: Any = module.get_submodule(part)
        self._forward_of_class, signature = forward_of(self.target)
        parameters = signature.parameters
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.parameters = frozenset(parameters)
        self.names = signature_of(getattr(self.target, "config", None), parameters)
        self.cache_name = cache_name_of(parameters)
        self.output_class: type[ModelOutput] = ModelOutput  # known after the first trace
        self.needs_mask = False  # set by the first trace of a decode step
        self.sliding_cache_unmasked = quirks.of(module).unmasked_sliding_cache
        self.needs_right_aligned_cache = quirks.of(module).right_aligned_cache  # or set by a trace
        self.folds_constants = False  # set by a trace that succeeds in no other way
        self.leaked_tensors: set[str] = set()  # tensors that the code has left on the module in some trace
        self.is_float32 = module.dtype == torch.float32
        self.rope = LengthDependentRope.of(module)
        self.watch = watch or ModuleWatch(module)
        # Integer tensors with one element by name, such as strides: constants in `method`.
        self.static_scalars: dict[str, int] = {}

    def with_module(self) -> ModelProgram:
        """Returns itself; of a stored model the program with the module."""
        return self

    def trace_facts(self) -> dict[str, Any]:
        """Returns the facts that traces have shown about the model.

        `restore_facts` takes them in a process that need not trace.
        """
        return {
            "output_class": f"{self.output_class.__module__}:{self.output_class.__qualname__}",
            "needs_mask": self.needs_mask,
            "needs_right_aligned_cache": self.needs_right_aligned_cache,
            "folds_constants": self.folds_constants,
        }

    def restore_facts(self, facts: dict[str, Any]) -> None:
        """Sets the facts that `trace_facts` has returned."""
        self.output_class = pkgutil.resolve_name(facts["output_class"])
        self.needs_mask = self.needs_mask or facts["needs_mask"]
        self.needs_right_aligned_cache = self.needs_right_aligned_cache or facts["needs_right_aligned_cache"]
        self.folds_constants = self.folds_constants or facts["folds_constants"]

    def check_no_leaked_tensors(self) -> None:
        """Raises UnsupportedModelError if the code has left tensors on the module in a trace."""
        if self.leaked_tensors:
            one, *others = sorted(self.leaked_tensors)
            raise UnsupportedModelError(
                f"expected a model that keeps its state in a cache, got one that keeps it in itself ({one} and "
                f"{len(others)} more), where requests would share it"
            )

    def accepts(self, name: str) -> bool:
        """Tells whether the forward has an argument `name`."""
        return name in self.parameters

    def forward(
        self,
        weights: Weights,
        states: LayerStates | None,
        offset: jax.Array | None,
        inputs: Arrays,
        spec: CallSpec,
    ) -> tuple[Arrays, LayerStates | None]:
        """Runs one forward; to be traced.

        Args:
            weights: Every tensor of the module by qualified name.
            states: Cache layers (`DeviceCache.states`), or None for a forward without a cache.
            offset: int32[], number of tokens already stored in the cache.
            inputs: Arrays by the forward's argument names. ``starts`` int32[batch] is the number of tokens of left
                padding, from which the attention mask is made. With ``last``, int32[] or int32[n], only the logits of
                these positions are returned. ``rope_lens``, int32[] or int32[len], are the sequence lengths that rotary
                frequencies are computed for; without it, the positions say the length.
            spec: The static arguments.

        Returns:
            The fields of the model's output by name, without its cache, and the new cache layers.
        """
        run = functools.partial(self._forward, spec=spec)
        return self.with_split_concats(run)(weights, states, offset, dict(inputs))

    def with_split_concats(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with the results of fused products as separate parts on a mesh.

        Applies if fused weights are divided over several devices; otherwise `function` is unchanged.
        """
        if self.sharding is None or not self.sharding.has_fused_weights:
            return function
        return split_concats(function, self.sharding.mesh)

    def _forward(
        self,
        weights: Weights,
        states: LayerStates | None,
        offset: jax.Array | None,
        inputs: Arrays,
        spec: CallSpec,
    ) -> tuple[Arrays, LayerStates | None]:
        inputs = dict(inputs)
        starts, last, rope_lens = (inputs.pop(name, None) for name in ("starts", "last", "rope_lens"))
        call = ForwardCall(weights, states, offset, inputs, spec, starts, last)
        first_error: Exception | None = None
        for mode in self._trace_modes(call):
            try:
                with lengths_told(rope_lens):
                    result = self._trace(call, mode)
            except Exception as error:
                first_error = first_error or error
                continue
            self.folds_constants = mode.folding
            self.needs_mask = self.needs_mask or (mode.masked and not spec.left_padded)
            self.needs_right_aligned_cache = mode.right_aligned or self.needs_right_aligned_cache
            return result
        assert first_error is not None
        raise first_error

    def _trace_modes(self, call: ForwardCall) -> tuple[TraceMode, ...]:
        has_pool = any(isinstance(x, AttentionLayer) and x.pool is not None for x in call.states or ())
        # A model that gets no positions counts them by the length of its cache, and would count empty room.
        takes_both = self.accepts(self.names.positions) and self.accepts(self.names.mask)
        return trace_modes(
            has_starts=call.starts is not None,
            must_mask=call.spec.left_padded or self.needs_mask or (has_pool and self.sliding_cache_unmasked),
            may_right_align=has_pool and (self.needs_right_aligned_cache or takes_both),
            must_right_align=self.needs_right_aligned_cache,
            must_fold=self.folds_constants,
        )

    def _trace(self, call: ForwardCall, mode: TraceMode) -> tuple[Arrays, LayerStates | None]:
        """Traces the forward in one mode."""
        spec, last, static_args = call.spec, call.last, as_tensors(dict(call.spec.static_args))
        kwargs, cache = self._arguments(call, mode, static_args)
        # With a static use_cache, transformers' own cache is a field of the output as any other.
        returns_own_cache = dict(spec.static_args).get("use_cache", False)
        fills_cache = returns_own_cache and generates_as_encoder(self.target)
        if fills_cache:
            assert self.cache_name is not None
            kwargs.setdefault(self.cache_name, DynamicCache(config=self.target.config))
        with (
            self.folding(spec, force=mode.folding),
            deferred_checks.collect() as met,
            index_checks.collect() as in_range,
            batch_recurrences.tracing(has_cache=cache is not None),
        ):
            output = self.run(call.weights, {**kwargs, **static_args}, self._attention(spec))
        if cache is not None:
            check_layers_keep_all(cache, self.cache_name, self.target)
        fields = {
            name: jax_view(as_views(value))  # some code returns an argument of known values unchanged
            for name, value in output.items()
            if value is not cache and (returns_own_cache or self.cache_name is None or name not in CACHE_NAMES)
        }
        if fills_cache and self.cache_name is not None:
            fields[self.cache_name] = jax_view(kwargs[self.cache_name])
        if met:
            fields[CHECKS] = jnp.stack(met)
        if in_range:
            fields[INDICES] = jnp.stack(in_range)
        if last is not None and not self.accepts("logits_to_keep"):
            fields["logits"] = (
                fields["logits"][:, last]
                if last.ndim
                else jax.lax.dynamic_slice_in_dim(fields["logits"], last, 1, axis=1)
            )
        if "logits" in fields:
            fields["logits"] = self.unpadded_logits(fields["logits"])
        return fields, None if cache is None else jax_view(cache.states())

    def _arguments(
        self, call: ForwardCall, mode: TraceMode, static_args: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        """Returns the forward's keyword arguments that are not static, and its cache or None."""
        states, offset, spec = call.states, call.offset, call.spec
        kwargs = without_constants(torch_view(call.inputs))
        text = {**call.inputs, **static_args}
        query = next((text[name] for name in (self.names.ids, self.names.embeds) if name in text), None)
        query_len = 0 if query is None else query.shape[1]
        cache = None
        if states is not None:
            viewed = torch_view(jax.tree.map(lambda x: x, states))  # a copy of the layers: another mode may follow
            aligned_len = query_len if mode.right_aligned else None
            cache = trace_cache(viewed, None if offset is None else torch_view(offset), aligned_len)
            assert self.cache_name is not None
            kwargs[self.cache_name] = cache
        if mode.masked and call.starts is not None and self.accepts(self.names.mask):
            starts, length = call.starts, query_len if cache is None else cache.mask_len(query_len)
            if self.sliding_cache_unmasked and offset is not None:
                starts = jnp.maximum(starts, offset - shortest_window(states) + 1)
            if mode.right_aligned:
                assert offset is not None
                starts = starts + (length - query_len - offset)
            if length:
                kwargs[self.names.mask] = padding_mask(starts, length)
        if self.accepts("use_cache"):
            kwargs["use_cache"] = cache is not None
        if call.last is not None and self.accepts("logits_to_keep"):
            kwargs["logits_to_keep"] = torch_view(jnp.atleast_1d(call.last))
        kwargs.update({flag: True for flag in ("output_hidden_states", "output_attentions") if getattr(spec, flag)})
        return kwargs, cache

    def unpadded_logits(self, logits: jax.Array) -> jax.Array:
        """Returns `logits` [..., vocab] without padding columns, replicated on every device."""
        if self.sharding is None:
            return logits
        size = self.sharding.vocab_size
        if size is not None and logits.shape[-1] > size:
            logits = logits[..., :size]
        return jax.lax.with_sharding_constraint(logits, self.sharding.replicated())

    def run(
        self,
        weights: Weights,
        kwargs: dict[str, Any],
        attention: str | None,
        functions: contextlib.AbstractContextManager[Any] | None = None,
    ) -> ModelOutput:
        """Calls the unmodified forward with `weights` as the module's tensors, inside a trace.

        `functions` is a context in which PyTorch's functions do something else.
        """
        # A forward that a script has set on the model itself calls this program; one set on a submodule is run.
        scripts = None if self.submodule else vars(self.module).get("forward")
        with self._substituted(weights, attention), FunctionInterception(), functions or contextlib.nullcontext():
            replaced = vars(self.target).get("forward")  # by a quirk, or a script
            forward: Any = self._forward_of_class if replaced is scripts or replaced is None else replaced
            output = forward(**kwargs, return_dict=True)
        if isinstance(output, torch.Tensor):
            output = TensorOutput(output)
        self.output_class = type(output)
        return output

    def method(self, weights: Weights, inputs: Arrays, spec: MethodSpec) -> tuple[Any, jax.Array | None]:
        """Calls a method of a submodule, such as the image encoder; to be traced.

        Returns:
            The method's result with arrays in place of tensors, and its deferred checks bool[n].
        """
        owner, _, name = spec.path.rpartition(".")
        with (
            self._substituted(weights, self._attention(CallSpec()), self.static_scalars),
            constant_folding.enabled(),
            deferred_checks.collect() as met,
        ):
            function = getattr(self.module.get_submodule(owner), name)
            kwargs = {**without_constants(torch_view(inputs)), **as_tensors(dict(spec.extra))}
            output = function(**kwargs)
        return jax_view(output), jnp.stack(met) if met else None

    @contextlib.contextmanager
    def _substituted(
        self, weights: Weights, attention: str | None, known: Mapping[str, int] | None = None
    ) -> Iterator[None]:
        """Replaces the module's tensors by `weights` and runs torch code on JAX, in the context.

        Scalars in `known` are constants instead.
        """
        with substituted(weights) as arrays:
            yield from self._with_arrays(arrays, attention, known or {})

    def _with_arrays(
        self, arrays: Mapping[str, jax.Array], attention: str | None, known: Mapping[str, int]
    ) -> Iterator[None]:
        state = torch_view({name: array for name, array in arrays.items() if name not in known})
        state |= {name: as_views(torch.tensor(value)) for name, value in known.items()}
        on_devices = (
            contextlib.nullcontext() if self.sharding is None else self.sharding.trace_context(self.module, arrays)
        )
        experts = moe.implementation(self.sharding is not None)
        hooked = on_torch_tensors(self.module) if self.watch.hooked else contextlib.nullcontext()
        with (
            self.watch.running(),
            torch_promotion(),
            hooked,
            config_overrides(self.module, attention=attention, experts=experts),  # one trace at a time from here on
            restored_attributes(self.module) as kept,
            without_memos(),
            on_devices,
            torch_mode(self.module, state),
            index_checks.named(arrays),
            quirks.apply_methods(self.module),
            rms_norm.intercepted(self.module),
            latent_attention.intercepted(self.module),
            contextlib.nullcontext() if self.rope is None else self.rope.intercepted(),
            jax.default_matmul_precision("highest") if self.is_float32 else contextlib.nullcontext(),
            module_scopes.intercepted(self.module),  # layers with a forward of their own share none
            contextlib.nullcontext() if self.watch.hooked else self._shared_layers(),
        ):
            yield
        self.leaked_tensors.update(kept)
        is_own = {name: jax_view(tensor) is arrays[name] for name, tensor in state.items() if name not in known}
        written = [name for name, is_so in is_own.items() if not is_so]
        if written:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} writes into its own weights ({', '.join(written[:3])}) when called; "
                "a compiled forward cannot"
            )

    def _shared_layers(self) -> contextlib.AbstractContextManager[None]:
        return shared_layers.intercepted(self.module, self.with_split_concats)

    def folding(self, spec: CallSpec, *, force: bool = False) -> contextlib.AbstractContextManager[None]:
        """Folds constants inside the context if the call needs it, or if `force` is set.

        A call needs it if some of its arguments are static, or if the model's code does.
        """
        is_static = any(isinstance(value, StaticTensor) for _, value in spec.static_args)
        is_needed = force or self.folds_constants or is_static
        return constant_folding.enabled() if is_needed else contextlib.nullcontext()

    def _attention(self, spec: CallSpec) -> str | None:
        return "eager" if spec.output_attentions else attention_name(self.module)
