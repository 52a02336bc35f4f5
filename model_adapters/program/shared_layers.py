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
from collections.abc import Callable, Hashable
from typing import Any

import jax
import torch
from jax.extend import core as jex

from model_adapters.jaxpr.interpreter import SHARED
from model_adapters.lowerings import deferred_checks, index_checks
from model_adapters.program.call_values import Form, built, is_plain, view_of
from model_adapters.program.layer_index import indices_of
from model_adapters.program.layer_structure import INTERCEPTION, LayerParts, NotComparableError
from model_adapters.program.layer_trial import LayerCall, LayerTrial, ModelLayer, restored
from model_adapters.program.trace_context import replaced_methods

logger = logging.getLogger("torchax_serve")

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def intercepted(module: torch.nn.Module, transform: Transform = _unchanged) -> contextlib.AbstractContextManager[None]:
    """Makes layers of `module` of one kind share one traced function inside the context.

    Args:
        module: The model.
        transform: Applied to each layer's function, as to the program.
    """
    replacements = []
    for layers in module.modules():
        if isinstance(layers, torch.nn.ModuleList) and len(layers) > 1:
            # Lists of diffusers have None where a block has no layer.
            found = (each for each in layers if each is not None and "forward" not in vars(each))
            own = {id(each): each for each in found if not _is_product(each)}
            if len(own) > 1:
                shared = _LayerList(list(own.values()), transform)
                forward = shared.forward()
                replacements += [(layer, "forward", forward) for layer in own.values()]
    return replaced_methods(replacements)


def _is_product(layer: torch.nn.Module) -> bool:
    """Returns whether a layer is products alone, which are not worth a call.

    A call would keep the parts of a fused result together.
    """
    kinds = (torch.nn.Linear, torch.nn.Sequential, torch.nn.Identity)
    return all(isinstance(part, kinds) for part in layer.modules())


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
        strided: By output, its strides as `_strided` has them.
        writes: Numbers of the inputs that are written to; their new arrays follow the outputs.
        num_checks: Number of deferred checks; index checks follow them.
    """

    run: Callable[..., Any]
    constants: list[Any]
    result: Form
    states: list[Form]
    objects: dict[int, Any]
    are_tensors: list[bool]
    strided: list[Any]
    writes: list[int]
    num_checks: int


class _LayerList:
    """The layers of one `ModuleList` in one trace."""

    def __init__(self, layers: list[torch.nn.Module], transform: Transform) -> None:
        self._modules, self._transform = layers, transform
        self._layers: dict[int, ModelLayer] = {}
        self._functions: dict[Hashable, tuple[Any, _Function | None]] = {}

    def _layer(self, module: torch.nn.Module) -> ModelLayer:
        if not self._layers:
            parts = [LayerParts(each) for each in self._modules]
            found = indices_of([each.tables for each in parts])
            for each, indices in zip(parts, found, strict=True):
                self._layers[id(each.layer)] = ModelLayer(each, indices)
        return self._layers[id(module)]

    def forward(self) -> Callable[..., Any]:
        """Returns the function in place of the layers' forward."""

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            own = type(module).forward
            is_traced = any(is_plain(value) for value in (*args, *kwargs.values()))
            layer = self._layer(module) if is_traced else None
            if layer is None or layer.structure is None:
                return own(module, *args, **kwargs)
            try:
                call = LayerCall(layer, args, kwargs)
            except NotComparableError as reason:
                logger.debug("%s is traced by itself: %s", type(module).__name__, reason)
                return own(module, *args, **kwargs)
            trace, function = self._functions.get(call.key, (None, None))
            if trace != call.trace:
                function = _traced(layer, call, self._transform)
                self._functions[call.key] = call.trace, function
            if function is not None and function.writes and not call.are_apart(function.writes):
                function = None
            return own(module, *args, **kwargs) if function is None else _apply(function, call)

        setattr(forward, INTERCEPTION, True)
        return forward


def _apply(function: _Function, call: LayerCall) -> Any:
    """Calls the function with the arrays of `call`.

    Returns the layer's result and updates its cache layers.
    """
    arrays = function.run(function.constants, call.weights.leaves, call.values.arrays())
    outputs = [
        view_of(array, strided) if is_tensor else array
        for array, is_tensor, strided in zip(arrays, function.are_tensors, function.strided, strict=False)
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


def _traced(layer: ModelLayer, call: LayerCall, transform: Transform) -> _Function | None:
    """Returns the function of the layer's kind.

    None if there is none: then the layer is to be traced by itself.

    Everything that the trace has changed is restored.
    """
    trial = LayerTrial(layer, call)
    name = type(layer.parts.layer).__name__
    try:
        with restored(layer, call):
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
        trial.strided,
        trial.writes,
        trial.num_checks,
    )
