"""The call of a layer, taken apart, and the trace of its code into a function.

The code runs on the module itself, with traced arrays in place of its tensors. Everything that it has changed is
restored, and a function is made only if its results tell all that it does.
"""

from __future__ import annotations

import contextlib
import logging
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jax.extend import core as jex
from transformers.cache_utils import Cache
from transformers.utils import output_capturing

from model_adapters.bridge.views import TorchTensor, default_env, is_view, jax_view, outside_torch_mode
from model_adapters.caches.device_cache import TraceCache
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.lowerings import aliases, deferred_checks, index_checks
from model_adapters.program.call_values import CallValues, Form, Results, built, extra_attributes
from model_adapters.program.layer_index import LayerIndex, OwnLayers, Reads
from model_adapters.program.layer_structure import LayerParts, NotComparableError, Snapshot, unchanged
from model_adapters.program.layer_weights import LayerWeights

logger = logging.getLogger("torchax_serve")

_CACHES = (TraceCache, PagedTraceCache)


class ModelLayer:
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

    def weights(self) -> LayerWeights:
        """Returns the tensors of the layer."""
        return LayerWeights(self.parts)


class LayerCall:
    """A call of a layer, taken apart.

    Attributes:
        key: Equal for calls of one kind.
        trace: State of JAX's trace: functions hold arrays of the trace that they were made in.
        values: Arrays and objects.
        states: Cache layers of this layer.
    """

    def __init__(self, layer: ModelLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = CallValues()
        self.arguments = self.values.form([list(args), kwargs])
        self.caches = [each for each in self.values.objects.values() if isinstance(each, Cache)]
        if any(type(cache) not in _CACHES for cache in self.caches):
            raise NotComparableError("it gets a cache of a class of its own")
        places = sorted(set(layer.indices.values()))
        self.states = [cache.layers[place] for cache in self.caches for place in places if place < len(cache.layers)]
        if self.caches and not self.states:
            raise NotComparableError("its part of the cache is not known")
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

    def are_apart(self, writes: list[int]) -> bool:
        """Tells whether inputs of these numbers share no element with other arguments."""
        given = (*self.values.inputs, *self.values.objects.values())
        shared = [each for each in given if isinstance(each, TorchTensor)]
        written = [self.values.inputs[number] for number in writes]
        return all(aliases.are_apart(one, each) for one in written for each in shared if each is not one)


class LayerTrial:
    """The trace of a layer into a function; `run` is traced once."""

    def __init__(self, layer: ModelLayer, call: LayerCall) -> None:
        self._layer, self._call = layer, call
        self.result: Form = None
        self.states: list[Form] = []
        self.are_tensors: list[bool] = []
        self.strided: list[Any] = []
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
        annotated = [extra_attributes(each) for each in tensors]
        on_host = [each for each in objects.values() if isinstance(each, torch.Tensor) and not is_view(each)]
        versions = [each._version for each in on_host]
        args, kwargs = built(call.arguments, inputs, objects)
        results = Results(inputs, objects)
        for state, form in zip(call.states, call.state_forms, strict=True):
            vars(state).update(built(form, inputs, objects))
        with (
            _out_of_reach([each for each in objects.values() if isinstance(each, UserDict)]),
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
        _require(unchanged(annotated, [extra_attributes(each) for each in tensors]), "it annotates its arguments")
        check = CallValues()
        check.inputs, check._numbers = list(inputs), {id(each): number for number, each in enumerate(inputs)}
        _require(check.form([list(args), kwargs]) == call.arguments, "it changes containers among its arguments")
        self.result = results.form(result)
        self.states = [results.form(vars(state)) for state in call.states]
        self.writes = self._writes(inputs, arrays)
        _require(not reads.found, f"it reads {', '.join(reads.found[:1])}")
        self.are_tensors = [isinstance(each, torch.Tensor) for each in results.outputs]
        self.strided = [getattr(each, "_strided", None) for each in results.outputs]
        self.num_checks = len(met)
        written = [jax_view(inputs[number]) for number in self.writes]
        return [*(jax_view(each) for each in results.outputs), *written, *met, *in_range]

    def _writes(self, inputs: list[Any], arrays: list[Any]) -> list[int]:
        """Returns the numbers of inputs that the code has written to, such as a cache's states."""
        found = [
            number
            for number, (each, array) in enumerate(zip(inputs, arrays, strict=True))
            if isinstance(each, torch.Tensor) and jax_view(each) is not array
        ]
        given = self._call.values.inputs
        are_same = all(inputs[number]._strided is given[number]._strided for number in found)
        _require(are_same, "it changes the strides of its arguments")
        _require(self._call.are_apart(found), "it writes to a view")
        return found


def _require(is_met: bool, reason: str) -> None:
    if not is_met:
        raise NotComparableError(reason)


@contextlib.contextmanager
def _out_of_reach(dicts: Sequence[UserDict[Any, Any]]) -> Iterator[None]:
    """Has all code fail that uses one of the dicts.

    Gemma 4 gives each layer a dict of keys and values that few layers fill or read; those are traced by themselves.
    """
    held = [(vars(each), vars(each).pop("data")) for each in dicts]
    try:
        yield
    finally:
        for attributes, data in held:
            attributes["data"] = data


@contextlib.contextmanager
def restored(layer: ModelLayer, call: LayerCall) -> Iterator[None]:
    """Restores what a trial may have changed of the layer, its cache, and the collected outputs.

    Raises:
        NotComparableError: The trial has added to the collected outputs, or changed the layer's structure or cache.
    """
    caches = [vars(each) for each in call.caches]
    before = [dict(each) for each in caches]
    collected = _collected()
    counts = {key: len(value) for key, value in collected.items() if isinstance(value, list)}
    states = [vars(state) for cache in call.caches for state in cache.layers]
    snapshot = Snapshot([*layer.parts.tables, *layer.parts.object_tables.values(), *states, *caches, collected])
    held = [each for table in states for each in table.values()]
    held += [inner for each in held if isinstance(each, dict) for inner in each.values()]  # states of recurrent layers
    written = [aliases.restorer(each) for each in held if type(each) is TorchTensor]
    tensors = [each for each in call.values.objects.values() if isinstance(each, torch.Tensor)]
    written += [aliases.restorer(each) if is_view(each) else _host_restorer(each) for each in tensors]
    random = default_env().param.prng
    try:
        yield
        _require(layer.parts.structure(layer.indices) == layer.structure, "it changes an attribute")
        _require(unchanged(before, caches), "it changes an attribute of its cache")
        _require(counts == {key: len(collected[key]) for key in counts}, "its outputs are collected")
    finally:
        snapshot.restore()
        for restore in written:  # in place
            restore()
        default_env().param.prng = random


def _host_restorer(tensor: torch.Tensor) -> Callable[[], None]:
    """Returns a function that gives a host tensor the values back of now."""
    version = tensor._version
    with outside_torch_mode():
        values = tensor.detach().clone()

    def restore() -> None:
        if tensor._version != version:
            with outside_torch_mode(), torch.no_grad():
                tensor.copy_(values)

    return restore


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
def _counted(layer: ModelLayer, reads: Reads) -> Iterator[None]:
    """Replaces the index of the layer by one that records reads, inside the context."""
    try:
        for (number, name), value in layer.indices.items():
            layer.parts.tables[number][name] = LayerIndex(value, reads)
        yield
    finally:
        for (number, name), value in layer.indices.items():
            layer.parts.tables[number][name] = value
