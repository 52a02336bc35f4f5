"""One traced and lowered function for all layers of a kind.

A model of 80 layers has a few kinds of them. While its forward is traced, the first layer of a kind is traced into a
function of its tensors, its arguments and its part of the cache; the later ones are calls of that function, so that
neither the model's code nor JAX's lowering runs for each. XLA gets one function and its calls.

Layers are of one kind if nothing that their code can read differs: the classes of their parts, attributes, arguments
other than traced arrays, state of the cache, shapes and dtypes (`LayerParts.structure`, `CallValues.form`). Their index
may differ, if the trace has used it for nothing but finding the own part of the cache (`LayerIndex`). A layer that does
more than return results and write its part of the cache is traced by itself: one that writes attributes, arguments or
other parts of the cache, draws random numbers, or has results that are not arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import torch
from jax.extend import core as jex
from transformers.cache_utils import Cache
from transformers.utils import output_capturing

from model_adapters.bridge.views import TorchTensor, default_env, is_view, jax_view, torch_view
from model_adapters.caches.device_cache import TraceCache
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.jaxpr.interpreter import SHARED
from model_adapters.lowerings import deferred_checks, index_checks
from model_adapters.ops import compressed_weight
from model_adapters.program.call_values import CallValues, Form, Results, annotations, built, is_plain
from model_adapters.program.layer_index import LayerIndex, OwnLayers, Reads, indices_of
from model_adapters.program.layer_structure import LayerParts, NotComparableError, unchanged
from model_adapters.program.trace_context import replaced_methods
from model_adapters.sharding import model_sharding

logger = logging.getLogger("torchax_serve")

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
_CACHES = (TraceCache, PagedTraceCache)


def intercepted(module: torch.nn.Module, transform: Transform) -> contextlib.AbstractContextManager[None]:
    """Makes layers of `module` of one kind share one traced function inside the context.

    Args:
        module: The model.
        transform: Applied to each layer's function, as to the program.
    """
    replacements = []
    for layers in module.modules():
        if isinstance(layers, torch.nn.ModuleList) and len(layers) > 1:
            own = {id(layer): layer for layer in layers if "forward" not in vars(layer)}
            if len(own) > 1:
                shared = _LayerList(list(own.values()), transform)
                replacements += [(layer, "forward", shared.forward) for layer in own.values()]
    return replaced_methods(replacements)


@dataclasses.dataclass(frozen=True)
class _Function:
    """The function of a kind of layers.

    Attributes:
        run: Jitted function of constants and inputs.
        constants: Arrays of the surrounding trace that the layers read.
        result: Form of what the layer returns.
        states: Form of each cache layer afterwards.
        objects: What forms name by identity.
        are_tensors: By output, whether it is a tensor.
        writes: Numbers of the inputs that are written to; their new arrays follow the outputs.
        num_checks: Number of deferred checks; index checks follow them.
    """

    run: Callable[..., Any]
    constants: list[Any]
    result: Form
    states: list[Form]
    objects: dict[int, Any]
    are_tensors: list[bool]
    writes: list[int]
    num_checks: int


class _Call:
    """A call of a layer, taken apart.

    Attributes:
        key: Equal for calls of one kind.
        trace: State of JAX's trace: functions hold arrays of the trace that they were made in.
        values: Arrays and objects.
        states: Cache layers of this layer.
    """

    def __init__(self, layer: _Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = CallValues()
        self.arguments = self.values.form([list(args), kwargs])
        self.caches = [each for each in self.values.objects.values() if isinstance(each, Cache)]
        if any(type(cache) not in _CACHES for cache in self.caches):
            raise NotComparableError("it gets a cache of a class of its own")
        places = sorted(set(layer.indices.values()))
        self.states = [cache.layers[place] for cache in self.caches for place in places if place < len(cache.layers)]
        self.state_forms = [self.values.form(vars(state)) for state in self.states]
        self.weights = layer.weights()
        self.key = (
            layer.structure,
            self.arguments,
            tuple((type(state), form) for state, form in zip(self.states, self.state_forms, strict=True)),
            len(self.caches) * len(places) == len(self.states),
            self.values.kinds(),
            self.weights.key,
        )
        self.trace = jex.get_opaque_trace_state()


class _Weights:
    """The tensors of a layer as inputs.

    Attributes:
        slots: Places of the tensors.
        arrays: Arrays of the surrounding trace, each once.
        stored: By array, its stored form or the array itself.
        key: Equal for layers whose weights have the same shapes, dtypes, forms and placements.
    """

    def __init__(self, parts: LayerParts) -> None:
        self.slots = parts.slots()
        tensors = [slot.table[slot.key] for slot in self.slots]
        if not all(is_plain(tensor) for tensor in tensors):
            raise NotComparableError("it has a tensor whose values are known")
        found = {id(array): array for array in (jax_view(tensor) for tensor in tensors)}
        numbers = {each: number for number, each in enumerate(found)}
        self.arrays = list(found.values())
        self.numbers = [numbers[id(jax_view(tensor))] for tensor in tensors]
        self.stored = [compressed_weight.stored_form(array) for array in self.arrays]
        self.placed = [model_sharding.placement_in_trace(array) for array in self.arrays]
        leaves, tree = jax.tree.flatten(self.stored)
        self.leaves = leaves
        self.tree = tree
        self.key = (
            tuple(self.numbers),
            tree,
            tuple(jax.typeof(leaf) for leaf in leaves),
            tuple(each and each.layout_key for each in self.placed),
        )

    @contextlib.contextmanager
    def replaced(self, leaves: list[Any]) -> Iterator[list[bool]]:
        """Puts `leaves` in place of the layer's tensors inside the context.

        Yields a list that has, at the end, whether each tensor was left unwritten.
        """
        stored = jax.tree.unflatten(self.tree, leaves)
        arrays = [compressed_weight.unpacked(each) for each in stored]
        before = [slot.table[slot.key] for slot in self.slots]
        unwritten: list[bool] = []
        with (
            compressed_weight.also_stored(list(zip(arrays, stored, strict=True))),
            model_sharding.also_placed(list(zip(arrays, self.placed, strict=True))),
            index_checks.also_named(list(zip(arrays, self.arrays, strict=True))),
        ):
            try:
                for slot, number in zip(self.slots, self.numbers, strict=True):
                    slot.table[slot.key] = torch_view(arrays[number])
                mine = [slot.table[slot.key] for slot in self.slots]
                yield unwritten
                unwritten += [
                    slot.table.get(slot.key) is tensor and jax_view(tensor) is arrays[number]
                    for slot, tensor, number in zip(self.slots, mine, self.numbers, strict=True)
                ]
            finally:
                for slot, tensor in zip(self.slots, before, strict=True):
                    slot.table[slot.key] = tensor


class _Layer:
    """A layer of a list.

    Attributes:
        parts: Its modules.
        indices: Attributes that are its index, by number of the part and name.
        structure: See `LayerParts.structure`; None if it has none.
    """

    def __init__(self, parts: LayerParts, indices: dict[tuple[int, str], int]) -> None:
        self.parts, self.indices = parts, indices
        self.structure: Hashable = None
        try:
            self.structure = parts.structure(indices)
        except NotComparableError as reason:
            logger.debug("%s is traced by itself: %s", type(parts.layer).__name__, reason)

    def weights(self) -> _Weights:
        """Returns the tensors of the layer."""
        return _Weights(self.parts)


class _LayerList:
    """The layers of one `ModuleList` in one trace."""

    def __init__(self, layers: list[torch.nn.Module], transform: Transform) -> None:
        self._modules, self._transform = layers, transform
        self._layers: dict[int, _Layer] = {}
        self._functions: dict[Hashable, tuple[Any, _Function | None]] = {}

    def _layer(self, module: torch.nn.Module) -> _Layer:
        if not self._layers:
            parts = [LayerParts(each) for each in self._modules]
            found = indices_of([each.tables for each in parts])
            for each, indices in zip(parts, found, strict=True):
                self._layers[id(each.layer)] = _Layer(each, indices)
        return self._layers[id(module)]

    @property
    def forward(self) -> Callable[..., Any]:
        """The function in place of the layers' forward."""

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            own = type(module).forward
            is_traced = any(is_plain(value) for value in (*args, *kwargs.values()))
            layer = self._layer(module) if is_traced else None
            if layer is None or layer.structure is None:
                return own(module, *args, **kwargs)
            try:
                call = _Call(layer, args, kwargs)
            except NotComparableError as reason:
                logger.debug("%s is traced by itself: %s", type(module).__name__, reason)
                return own(module, *args, **kwargs)
            trace, function = self._functions.get(call.key, (None, None))
            if trace != call.trace:
                function = _traced(layer, call, self._transform)
                self._functions[call.key] = call.trace, function
            return own(module, *args, **kwargs) if function is None else _apply(function, call)

        return forward


def _apply(function: _Function, call: _Call) -> Any:
    """Calls the function with the arrays of `call`; returns the layer's result and updates its cache layers."""
    arrays = function.run(function.constants, call.weights.leaves, call.values.arrays())
    outputs = [
        torch_view(array) if is_tensor else array
        for array, is_tensor in zip(arrays, function.are_tensors, strict=False)
    ]
    written, checks = _split(arrays[len(function.are_tensors) :], len(function.writes))
    for number, array in zip(function.writes, written, strict=True):
        call.values.inputs[number]._elem = array
    met, in_range = _split(checks, function.num_checks)
    deferred_checks.add(met)
    index_checks.add(in_range)
    objects = {**function.objects, **call.values.objects}
    for state, form in zip(call.states, function.states, strict=True):
        vars(state).update(built(form, call.values.inputs, objects, outputs))
    return built(function.result, call.values.inputs, objects, outputs)


def _split(items: list[Any], number: int) -> tuple[list[Any], list[Any]]:
    return items[:number], items[number:]


def _traced(layer: _Layer, call: _Call, transform: Transform) -> _Function | None:
    """Returns the function of the layer's kind; None if there is none: then the layer is to be traced by itself.

    Everything that the trace has changed is restored.
    """
    trial = _Trial(layer, call)
    name = type(layer.parts.layer).__name__
    try:
        with _restored(layer, call):
            closed = jax.make_jaxpr(trial.run)(call.weights.leaves, call.values.arrays())
    except Exception as error:  # whatever it is, the layer's own trace meets it, or does not
        logger.debug("%s is traced by itself: %s: %s", name, type(error).__name__, error)
        return None
    jaxpr = closed.jaxpr

    def run(constants: list[Any], *args: Any) -> Any:
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, constants))(*jax.tree.leaves(args))

    transformed = transform(run)
    transformed.__name__ = f"{SHARED}{name}"
    return _Function(
        jax.jit(transformed),
        list(closed.consts),
        trial.result,
        trial.states,
        call.values.objects,
        trial.are_tensors,
        trial.writes,
        trial.num_checks,
    )


class _Trial:
    """The trace of a layer into a function; `run` is traced once."""

    def __init__(self, layer: _Layer, call: _Call) -> None:
        self._layer, self._call = layer, call
        self.result: Form = None
        self.states: list[Form] = []
        self.are_tensors: list[bool] = []
        self.writes: list[int] = []
        self.num_checks = 0

    def run(self, weights: list[Any], arrays: list[Any]) -> list[Any]:
        """Runs the layer's code on traced arrays; returns all that is new.

        Raises:
            NotComparableError: The layer does more than can be told by its results.
        """
        layer, call, reads = self._layer, self._call, Reads()
        inputs = call.values.within(arrays)
        objects = call.values.objects
        tensors = [each for each in (*inputs, *objects.values()) if isinstance(each, torch.Tensor)]
        given = [(each, jax_view(each)) for each in objects.values() if is_view(each)]
        annotated = [annotations(each) for each in tensors]
        on_host = [each for each in objects.values() if isinstance(each, torch.Tensor) and not is_view(each)]
        versions = [each._version for each in on_host]
        args, kwargs = built(call.arguments, inputs, objects)
        results = Results(inputs, objects)
        for state, form in zip(call.states, call.state_forms, strict=True):
            vars(state).update(built(form, inputs, objects))
        with (
            _own_layers(call.caches, reads),
            _counted(layer, reads),
            call.weights.replaced(weights) as unwritten,
            deferred_checks.collect_if_collected() as met,
            index_checks.collect_if_collected() as in_range,
        ):
            tables = [table for each in layer.parts.tables for table in (each, each["_modules"])]
            before = [dict(table) for table in tables]
            random = default_env().param.prng
            result = type(layer.parts.layer).forward(layer.parts.layer, *args, **kwargs)
            _require(unchanged(before, tables), "it writes an attribute")
            _require(default_env().param.prng is random, "it draws random numbers")
        _require(all(unwritten), "it writes into its weights")
        _require(all(jax_view(each) is array for each, array in given), "it writes into its arguments")
        _require(versions == [each._version for each in on_host], "it writes into its arguments")
        _require(unchanged(annotated, [annotations(each) for each in tensors]), "it annotates its arguments")
        check = CallValues()
        check.inputs, check._numbers = list(inputs), {id(each): number for number, each in enumerate(inputs)}
        _require(check.form([list(args), kwargs]) == call.arguments, "it changes containers among its arguments")
        self.result = results.form(result)
        self.states = [results.form(vars(state)) for state in call.states]
        self.writes = self._writes(inputs, arrays)
        _require(not reads.found, f"it reads {', '.join(reads.found[:1])}")
        self.are_tensors = [isinstance(each, torch.Tensor) for each in results.outputs]
        self.num_checks = len(met)
        written = [jax_view(inputs[number]) for number in self.writes]
        return [*(jax_view(each) for each in results.outputs), *written, *met, *in_range]

    def _writes(self, inputs: list[Any], arrays: list[Any]) -> list[int]:
        """Returns the numbers of inputs that the code has written to, as it does to states in a cache."""
        found = [
            number
            for number, (each, array) in enumerate(zip(inputs, arrays, strict=True))
            if isinstance(each, torch.Tensor) and jax_view(each) is not array
        ]
        _require(all(type(self._call.values.inputs[number]) is TorchTensor for number in found), "it writes to a view")
        return found


def _require(is_met: bool, reason: str) -> None:
    if not is_met:
        raise NotComparableError(reason)


@contextlib.contextmanager
def _restored(layer: _Layer, call: _Call) -> Iterator[None]:
    """Restores what a trial may have changed of the layer, its cache, and the collected outputs.

    Raises:
        NotComparableError: The trial has added to the collected outputs, or changed the layer's structure or cache.
    """
    tables = [
        table
        for each in layer.parts.tables
        for table in (each, each["_parameters"], each["_buffers"], each["_modules"])
    ]
    owners = [*tables, *(vars(each) for each in (*call.states, *call.caches))]
    before = [dict(table) for table in owners]
    random = default_env().param.prng
    collected = {key: list(value) for key, value in _collected().items() if isinstance(value, list)}
    try:
        yield
        _require(unchanged(before[len(tables) + len(call.states) :], [vars(each) for each in call.caches]), "its cache")
        _require({key: len(_collected()[key]) for key in collected} == {k: len(v) for k, v in collected.items()}, "out")
    finally:
        for table, then in zip(owners, before, strict=True):
            if table.keys() != then.keys() or any(table[key] is not value for key, value in then.items()):
                table.clear()
                table.update(then)
        default_env().param.prng = random
        for key, value in collected.items():
            _collected()[key][:] = value
    _require(layer.parts.structure(layer.indices) == layer.structure, "it changes an attribute")


def _collected() -> Mapping[str, Any]:
    return output_capturing._active_collector.get() or {}


@contextlib.contextmanager
def _own_layers(caches: list[Any], reads: Reads) -> Iterator[None]:
    """Lets code use only the cache layers of its index without a record, inside the context."""
    before = [cache.layers for cache in caches]
    try:
        for cache in caches:
            cache.layers = OwnLayers(cache.layers, reads)
        yield
        for cache, layers in zip(caches, before, strict=True):
            _require(list.__len__(cache.layers) == len(layers), "it adds layers to its cache")
    finally:
        for cache, layers in zip(caches, before, strict=True):
            cache.layers = layers


@contextlib.contextmanager
def _counted(layer: _Layer, reads: Reads) -> Iterator[None]:
    """Replaces the index of the layer by one that records reads, inside the context."""
    try:
        for (number, name), value in layer.indices.items():
            layer.parts.tables[number][name] = LayerIndex(value, reads)
        yield
    finally:
        for (number, name), value in layer.indices.items():
            layer.parts.tables[number][name] = value
