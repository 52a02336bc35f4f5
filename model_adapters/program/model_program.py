"""A Hugging Face model as a pure function of its weights and its cache."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

import pytree_registry
from model_adapters import quirks
from model_adapters.attention import attention_name, padding_mask, uses_attention_interface
from model_adapters.bridge.views import as_views, jax_view, torch_mode, torch_view
from model_adapters.caches.device_cache import LayerStates, check_layers_keep_all, shortest_window, trace_cache
from model_adapters.caches.layers import AttentionLayer
from model_adapters.caches.native_cache import generates_as_encoder
from model_adapters.caches.paged_cache import (
    NotPackableError,
    PackedBatch,
    PagedLayout,
    PagedTraceCache,
    Pool,
    laid_out,
)
from model_adapters.errors import UnsupportedModelError
from model_adapters.jaxpr.row_pruning import prune_rows
from model_adapters.jaxpr.split_concats import split_concats
from model_adapters.lowerings import constant_folding, deferred_checks, index_checks, install
from model_adapters.ops.compressed_weight import Weights, substituted
from model_adapters.ops.spmd import by_token, tokens_divided
from model_adapters.program import moe, rms_norm
from model_adapters.program.call_signature import CACHE_NAMES, cache_name_of, forward_of, signature_of
from model_adapters.program.call_spec import CallSpec as CallSpec
from model_adapters.program.call_spec import MethodSpec as MethodSpec
from model_adapters.program.module_hooks import on_torch_tensors
from model_adapters.program.module_watch import ModuleWatch
from model_adapters.program.rope import LengthDependentRope, lengths_told
from model_adapters.program.static_tensors import StaticTensor, as_tensors, without_constants
from model_adapters.program.trace_context import config_overrides, restored_attributes, torch_promotion
from model_adapters.sharding.model_sharding import ModelSharding

Arrays = dict[str, Any]


INDICES = "indices"
"""Beside the fields of an output: whether indices were rows of the tables they were looked up in, bool[n]."""


CHECKS = "conditions"
"""Beside the fields of an output: what the model's code checks of values, bool[n], all True where they are met."""


class ModelProgram:
    """Runs the unmodified forward of `module` as ``forward(weights, states, offset, inputs, spec)``.

    The module is a template: its own tensors are never read, those of `weights` stand in their place.

    Args:
        module: the model.
        sharding: how `weights` lie on a mesh; None: on one device, as the model has them.
        submodule: name of a part of `module`, such as its encoder, that is called in its place.
        watch: of `module`, which notices that it has changed; None makes one.

    Attributes:
        target: the module or its part.
        names: what the forward calls the tokens that are decoded.
        rope: rotary modules whose frequencies depend on a sequence's length; None where there are none.
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
        self.needs_mask = False  # found out at the first trace of a decode step
        self.sliding_cache_unmasked = quirks.of(module).unmasked_sliding_cache
        self.needs_right_aligned_cache = quirks.of(module).right_aligned_cache  # or set by a trace that needs one
        self.folds_constants = False  # set where a trace succeeds with nothing else
        self.leaked_tensors: set[str] = set()  # tensors that the code has left on the module in some trace
        self.is_float32 = module.dtype == torch.float32
        self.rope = LengthDependentRope.of(module)
        self.watch = watch or ModuleWatch(module)
        self.static_scalars: dict[
            str, int
        ] = {}  # tensors of one whole number by name, such as strides, known in methods

    def trace_facts(self) -> dict[str, Any]:
        """What tracing has shown about the model, for `restore_facts` in a process that need not trace."""
        return {
            "output_class": self.output_class,
            "needs_mask": self.needs_mask,
            "needs_right_aligned_cache": self.needs_right_aligned_cache,
            "folds_constants": self.folds_constants,
        }

    def restore_facts(self, facts: dict[str, Any]) -> None:
        """Takes over what `trace_facts` answered."""
        self.output_class = facts["output_class"]
        self.needs_mask = self.needs_mask or facts["needs_mask"]
        self.needs_right_aligned_cache = self.needs_right_aligned_cache or facts["needs_right_aligned_cache"]
        self.folds_constants = self.folds_constants or facts["folds_constants"]

    def check_no_leaked_tensors(self) -> None:
        """Raises UnsupportedModelError if a trace has shown that the code keeps tensors on the module."""
        if self.leaked_tensors:
            one, *others = sorted(self.leaked_tensors)
            raise UnsupportedModelError(
                f"expected a model that keeps its state in a cache, got one that keeps it in itself ({one} and "
                f"{len(others)} more), where requests would share it"
            )

    def accepts(self, name: str) -> bool:
        """Whether the forward names an argument `name`."""
        return name in self.parameters

    def forward(
        self,
        weights: Weights,
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
                attention mask is made of it. ``last`` int32[] asks for the logits of that one position. ``rope_lens``,
                int32[] or int32[len], are lengths of sequences that rotary frequencies are for; without, they are for
                that of the positions.
            spec: what is static.

        Returns:
            The fields of the model's output by name, without its cache, and the new cache layers.
        """
        run = functools.partial(self._forward, spec=spec)
        return self._with_split_concats(run)(weights, states, offset, dict(inputs))

    def _with_split_concats(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with the results of fused products kept in parts where they lie on several devices."""
        return split_concats(function) if self.sharding is not None and self.sharding.has_fused_weights else function

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
        first_error: Exception | None = None
        folds = (True,) if self.folds_constants else (False, True)
        for fold, (masked, leaning) in itertools.product(folds, self._trace_modes(states, starts, spec)):
            given = starts if masked else None
            before, self.folds_constants = self.folds_constants, fold
            try:
                with lengths_told(rope_lens):
                    result = self._trace(weights, states, offset, inputs, spec, given, last, leaning)
            except Exception as error:
                first_error, self.folds_constants = first_error or error, before
                continue
            self.needs_mask, self.needs_right_aligned_cache = (
                self.needs_mask or (masked and not spec.left_padded),
                leaning or self.needs_right_aligned_cache,
            )
            return result
        assert first_error is not None
        raise first_error

    def _trace_modes(
        self, states: LayerStates | None, starts: jax.Array | None, spec: CallSpec
    ) -> tuple[tuple[bool, bool], ...]:
        """How a forward may be called, with a mask or without and on a cache that leans or not, the cheapest first.

        Some models count positions by a mask they make themselves, of a length that only the host could know; some
        count from the end of the keys, or compare their number.
        """
        holds = states is not None and any(isinstance(x, AttentionLayer) and x.pool is not None for x in states)
        if starts is None:
            return ((False, False),)
        # A model that counts positions by the length of its cache would count what is not there.
        may_lean = self.needs_right_aligned_cache or (
            self.accepts(self.names.positions) and self.accepts(self.names.mask)
        )
        leaning = ((True, True),) if holds and may_lean else ()
        if self.needs_right_aligned_cache and leaning:
            return leaning
        if spec.left_padded or self.needs_mask or (holds and self.sliding_cache_unmasked):
            return ((True, False), *leaning)
        return ((False, False), (True, False), *leaning)

    def _trace(
        self,
        weights: Weights,
        states: LayerStates | None,
        offset: jax.Array | None,
        inputs: Arrays,
        spec: CallSpec,
        starts: jax.Array | None,
        last: jax.Array | None,
        leaning: bool,
    ) -> tuple[Arrays, LayerStates | None]:
        """One trace of the forward; `starts` is None for no attention mask."""
        kwargs = without_constants(torch_view(inputs))
        rest = as_tensors(dict(spec.static_args))
        text = {**inputs, **rest}
        query = next((text[name] for name in (self.names.ids, self.names.embeds) if name in text), None)
        query_len = 0 if query is None else query.shape[1]
        cache = None
        if states is not None:
            viewed = torch_view(jax.tree.map(lambda x: x, states))  # layers of its own: another attempt may follow
            cache = trace_cache(viewed, None if offset is None else torch_view(offset), query_len if leaning else None)
            assert self.cache_name is not None
            kwargs[self.cache_name] = cache
        if starts is not None and self.accepts(self.names.mask):
            length = query_len if cache is None else cache.mask_len(query_len)
            if self.sliding_cache_unmasked and offset is not None:
                starts = jnp.maximum(starts, offset - shortest_window(states) + 1)
            if leaning:
                assert offset is not None
                starts = starts + (length - query_len - offset)
            if length:
                kwargs[self.names.mask] = padding_mask(starts, length)
        if self.accepts("use_cache"):
            kwargs["use_cache"] = cache is not None
        keeps_own = dict(spec.static_args).get("use_cache", False)  # transformers' cache, a field as any other
        fills_cache = keeps_own and generates_as_encoder(self.target)
        if fills_cache:
            kwargs.setdefault(self.cache_name, DynamicCache(config=self.target.config))
        keep_one = self.accepts("logits_to_keep")
        if last is not None and keep_one:
            kwargs["logits_to_keep"] = torch_view(last[None])
        kwargs.update({flag: True for flag in ("output_hidden_states", "output_attentions") if getattr(spec, flag)})
        with self._folding(spec), deferred_checks.collect() as met, index_checks.collected() as in_range:
            output = self._run(weights, {**kwargs, **rest}, self._attention(spec))
        if cache is not None:
            check_layers_keep_all(cache, self.cache_name, self.target)
        fields = {
            name: jax_view(as_views(value))  # some hand an argument of known values back as it came
            for name, value in output.items()
            if value is not cache and (keeps_own or self.cache_name is None or name not in CACHE_NAMES)
        }
        if fills_cache:
            assert self.cache_name is not None
            fields[self.cache_name] = jax_view(kwargs[self.cache_name])
        if met:
            fields[CHECKS] = jnp.stack(met)
        if in_range:
            fields[INDICES] = jnp.stack(in_range)
        if last is not None and not keep_one:
            fields["logits"] = jax.lax.dynamic_slice_in_dim(fields["logits"], last, 1, axis=1)
        if "logits" in fields:
            fields["logits"] = self._unpadded_logits(fields["logits"])
        return fields, None if cache is None else jax_view(cache.states())

    def _unpadded_logits(self, logits: jax.Array) -> jax.Array:
        """`logits` [..., vocab] without columns that fill the vocabulary up, the same on every device."""
        if self.sharding is None:
            return logits
        if logits.shape[-1] > self.sharding.vocab_size:
            logits = logits[..., : self.sharding.vocab_size]
        return jax.lax.with_sharding_constraint(logits, self.sharding.replicated())

    def forward_packed(
        self,
        weights: Weights,
        pools: tuple[Pool, ...],
        batch: PackedBatch,
        layout: PagedLayout,
    ) -> tuple[jax.Array, tuple[Pool, ...]]:
        """One forward of many sequences packed into one row, on the paged cache; to be traced.

        Returns:
            Logits [S, vocab] of each sequence's last token ([T, vocab] with `all_logits`), and the new pools.

        Raises:
            NotPackableError: something in the model's code does not let sequences be packed.
        """
        if self.names.has_encoder:
            raise NotPackableError("there is an encoder beside the decoder")
        if not (self.cache_name and self.accepts("position_ids") and uses_attention_interface(self.module)):
            raise NotPackableError("the forward takes no positions, or attends past transformers' attention interface")
        run = self._with_split_concats(functools.partial(self._forward_packed, layout=layout))
        return (run if layout.is_decode or layout.all_logits else prune_rows(run))(weights, pools, batch)

    def _forward_packed(
        self,
        weights: Weights,
        pools: tuple[Pool, ...],
        batch: PackedBatch,
        layout: PagedLayout,
    ) -> tuple[jax.Array, tuple[Pool, ...]]:
        sharding = self.sharding
        divided: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if sharding is not None and not layout.is_decode and sharding.divides_tokens(batch.token_ids.shape[0]):
            weights, divided = sharding.with_gathered_layers(weights), tokens_divided()
            ids, positions = (by_token(x, sharding.mesh) for x in (batch.token_ids, batch.positions))
            batch = dataclasses.replace(batch, token_ids=ids, positions=positions)
        cache = PagedTraceCache(pools, batch, layout)
        assert self.cache_name is not None
        kwargs = {
            "input_ids": torch_view(batch.token_ids[None]),
            "position_ids": torch_view(batch.positions[None]),
            self.cache_name: cache,
            "use_cache": True,
        }
        keep_last = self.accepts("logits_to_keep") and not layout.all_logits
        if keep_last:
            kwargs["logits_to_keep"] = torch_view(batch.last)
        rope_lens = batch.positions + 1 if layout.is_decode else batch.rope_lens
        assert self.rope is None or rope_lens is not None
        with divided, self._folding(CallSpec()), lengths_told(rope_lens):
            output = self._run(weights, kwargs, attention_name(self.module))
        check_layers_keep_all(cache, self.cache_name, self.target)
        logits = jax_view(output["logits"])[0]
        if not keep_last and not layout.all_logits:
            logits = logits[batch.last]
        pools = cache.pools()
        if sharding is not None:
            pools = tuple(laid_out(pool, sharding.pool_sharding, jax.lax.with_sharding_constraint) for pool in pools)
        return self._unpadded_logits(logits), pools

    def _run(self, weights: Weights, kwargs: dict[str, Any], attention: str | None) -> ModelOutput:
        """The unmodified forward, with `weights` in the place of the module's own tensors."""
        # What a script has put on the model itself calls this; what it has put on a part is the part's forward.
        scripts = None if self.submodule else vars(self.module).get("forward")
        with self._in_place(weights, attention):
            replaced = vars(self.target).get("forward")  # by a quirk, or a script
            forward: Any = self._forward_of_class if replaced is scripts or replaced is None else replaced
            output = forward(**kwargs, return_dict=True)
        self.output_class = type(output)
        return output

    def method(self, weights: Weights, inputs: Arrays, spec: MethodSpec) -> tuple[Any, jax.Array | None]:
        """A method of a part of the module, such as the encoder of images by itself; to be traced.

        Returns:
            What the method returns, arrays in the place of tensors, and the conditions bool[n] that must be met.
        """
        owner, _, name = spec.path.rpartition(".")
        with (
            self._in_place(weights, self._attention(CallSpec()), self.static_scalars),
            constant_folding.enabled(),
            deferred_checks.collect() as met,
        ):
            function = getattr(self.module.get_submodule(owner), name)
            kwargs = {**without_constants(torch_view(inputs)), **as_tensors(dict(spec.extra))}
            output = function(**kwargs)
        return jax_view(output), jnp.stack(met) if met else None

    @contextlib.contextmanager
    def _in_place(
        self, weights: Weights, attention: str | None, known: Mapping[str, int] | None = None
    ) -> Iterator[None]:
        """Inside, `weights` stand in the place of the module's own tensors and torch code computes on JAX.

        Those that are `known` are constants.
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
        grouped = moe.GROUPED_MM if self.sharding is None else moe.IMPLEMENTATION
        hooked = on_torch_tensors(self.module) if self.watch.hooked else contextlib.nullcontext()
        with (
            self.watch.running(),
            torch_promotion(),
            hooked,
            config_overrides(self.module, attention=attention, experts=grouped),  # one trace at a time from here on
            restored_attributes(self.module) as kept,
            on_devices,
            torch_mode(self.module, state),
            index_checks.named(arrays),
            quirks.apply_methods(self.module),
            rms_norm.intercepted(self.module),
            contextlib.nullcontext() if self.rope is None else self.rope.intercepted(),
            jax.default_matmul_precision("highest") if self.is_float32 else contextlib.nullcontext(),
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

    def _folding(self, spec: CallSpec) -> contextlib.AbstractContextManager[None]:
        """Where some arguments are known, or code needs it, what is computed of known values alone stays known."""
        knows = self.folds_constants or any(isinstance(value, StaticTensor) for _, value in spec.static_args)
        return constant_folding.enabled() if knows else contextlib.nullcontext()

    def _attention(self, spec: CallSpec) -> str | None:
        return "eager" if spec.output_attentions else attention_name(self.module)
