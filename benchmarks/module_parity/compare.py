"""Comparison of one module, as JAX computes it, with eager PyTorch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from torchax_serve import TorchaxServeError, extract_jax, to_jax
from torchax_serve.parity.result import error_line

OUTPUTS, GRADIENTS = 1e-4, 1e-3
"""Largest difference that counts as right, relative to the largest number of an output or a gradient."""
MOST_WEIGHTS = 60e6
"""Weights of the largest module that is compared."""


class NoGradientError(Exception):
    """PyTorch has no gradient to compare with."""


class Case(NamedTuple):
    """How a module is made, and its arguments: a tuple, or a tuple and a dict of keywords in a tuple."""

    make: Callable[[], torch.nn.Module]
    inputs: Callable[[], tuple[Any, ...]]


def compared(case: Case) -> dict[str, Any]:
    """The row of a module.

    ``outputs`` is the difference of `to_jax`, ``gradients`` that of `jax.grad` under `jax.jit`, and
    ``rounding`` and ``gradient_rounding`` that of PyTorch's own in float32 and in float64, where they differ.
    """
    began, row = time.process_time(), {}
    try:
        torch.manual_seed(0)
        module, (args, kwargs) = varied(case.make().eval()), _arguments(case.inputs())
        row["weights"] = sum(each.numel() for each in module.parameters())
        if row["weights"] > MOST_WEIGHTS:
            return row | {"status": "too large"}
        with torch.no_grad():
            theirs = _tensors(module(*args, **kwargs))
        if not any(each.numel() == 1 or bool((each != each.flatten()[0]).any()) for each in theirs if each.numel()):
            return row | {"status": "impossible", "error": "its output in eager PyTorch is constant"}
    except Exception as error:  # whatever PyTorch says
        return row | {"status": "impossible", "error": error_line(error)}
    problems = []
    try:
        row["gradients"], of_pytorch = gradient_difference(module, args, kwargs)
        row |= {} if of_pytorch is None else {"gradient_rounding": of_pytorch}
    except NoGradientError as error:
        row |= {"gradients": None, "no_gradients": str(error)}
    except Exception as error:
        row["gradients"] = None
        problems.append(f"gradients: {error_line(error)}")
    status = "passed"
    try:
        reference = _copied(module)
        row["outputs"] = difference(_tensors(to_jax(module)(*args, **kwargs)), theirs)
        if row["outputs"] > OUTPUTS:
            status = "differs"
            row["rounding"] = rounding(reference, args, kwargs, theirs)
    except Exception as error:
        status = "refused" if isinstance(error, TorchaxServeError) else "failed"
        problems.insert(0, error_line(error))
    row |= {"status": status, "seconds": round(time.process_time() - began, 1)}
    return row | ({"error": "; ".join(problems)} if problems else {})


def varied(module: torch.nn.Module) -> torch.nn.Module:
    """The module with other numbers in place of constant weights, such as ones of norms and zeros of last layers."""
    generator = torch.Generator().manual_seed(1)

    def noise(tensor):
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point() and (weight.numel() < 2 or float(weight.float().std()) == 0):
                weight += 0.1 * noise(weight)
        for name, tensor in module.named_buffers():
            if name.endswith("running_mean"):
                tensor += 0.1 * noise(tensor)
            elif name.endswith("running_var"):
                tensor *= 1 + 0.1 * noise(tensor).abs()
    return module


def _arguments(inputs):
    is_pair = len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict)
    return inputs if is_pair else (inputs, {})


def _copied(module):
    try:
        return copy.deepcopy(module)
    except Exception:  # some modules hold what cannot be copied
        return None


def _tensors(outputs):
    leaves = jax.tree.leaves(_plain(outputs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | jax.Array)]


def _plain(outputs):
    """Outputs in lists and dicts, of the classes of libraries as well."""
    if isinstance(outputs, dict):
        return {key: _plain(value) for key, value in outputs.items()}
    if hasattr(outputs, "_asdict"):
        return {key: _plain(value) for key, value in outputs._asdict().items()}
    if isinstance(outputs, list | tuple):
        return [_plain(value) for value in outputs]
    if hasattr(outputs, "__dataclass_fields__"):
        return {name: _plain(getattr(outputs, name)) for name in outputs.__dataclass_fields__}
    return outputs


def _numbers(tensor):
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().resolve_conj().resolve_neg()
        return tensor.double().numpy() if not tensor.is_complex() else tensor.numpy()
    return np.asarray(jax.device_get(tensor), np.complex128 if np.iscomplexobj(tensor) else np.float64)


def difference(ours, theirs):
    """The largest difference of lists of tensors, relative to the largest number of each."""
    if len(ours) != len(theirs):
        raise ValueError(f"expected {len(theirs)} tensors, got {len(ours)}")
    found = 0.0
    for one, other in zip(map(_numbers, ours), map(_numbers, theirs), strict=True):
        if one.shape != other.shape:
            raise ValueError(f"expected the shape {other.shape}, got {one.shape}")
        if not other.size:
            continue
        if not np.array_equal(np.isfinite(one), np.isfinite(other)):
            return float("inf")
        known = np.isfinite(other)
        largest = float(np.abs(other[known]).max(initial=0.0)) or 1.0
        found = max(found, float(np.abs(one[known] - other[known]).max(initial=0.0)) / largest)
    return float(found)


def rounding(module, args, kwargs, theirs):
    """The difference of PyTorch's outputs from those in float64; None where its code cannot compute them."""
    try:
        with torch.no_grad():
            exact = module.double()(*jax.tree.map(_double, args), **jax.tree.map(_double, kwargs))
        return difference(theirs, _tensors(exact))
    except Exception:
        return None


def _double(leaf):
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def gradient_difference(module, args, kwargs):
    """The largest difference of gradients by the weights and by the arguments in float32.

    It is relative to the largest number of each, or to a hundredth of the largest of all if that is more. Where it is
    more than `GRADIENTS`, the same of PyTorch's own gradients in float32 and in float64 comes second, else None.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32]
    wanted, inputs, factors = _own_gradients(module, leaves, tree, places)
    places = [at for at, each in zip(places, inputs, strict=True) if each is not None]
    if not all(bool(each.isfinite().all()) for each in (*wanted.values(), *inputs) if each is not None):
        raise NoGradientError("that of PyTorch is not finite")
    weights, function = extract_jax(module)
    some = {name: weights[name] for name in wanted}
    named = {id(weights[name]): name for name in wanted}  # tied weights have several names, and one gradient

    def loss(some, inputs):
        given = list(leaves)
        for at, array in zip(places, inputs, strict=True):
            given[at] = array
        args, kwargs = jax.tree.unflatten(tree, given)
        own = {name: some[named[id(each)]] if id(each) in named else each for name, each in weights.items()}
        results = _floats(_tensors(function(own, args, kwargs)))
        return sum((each * factor).sum() for each, factor in zip(results, factors, strict=True))

    gradient, arrays = jax.grad(loss, (0, 1)), [jax.numpy.asarray(leaves[at].numpy()) for at in places]
    try:
        found = jax.jit(gradient)(some, arrays)
    except (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError):
        found = gradient(some, arrays)  # the code reads its integers, which are values outside of a jit
    theirs = [*wanted.values(), *(each for each in inputs if each is not None)]
    apart = _apart([*(found[0][name] for name in wanted), *found[1]], theirs)
    return apart, (None if apart <= GRADIENTS else _gradient_rounding(module, leaves, tree, places, theirs))


def _own_gradients(module, leaves, tree, places):
    """PyTorch's gradients by weights, by name, and by the leaves at `places`; and the factors of the outputs."""
    own = [leaf.clone().requires_grad_() if at in places else leaf for at, leaf in enumerate(leaves)]
    args, kwargs = jax.tree.unflatten(tree, own)
    outputs = _floats(_tensors(module(*args, **kwargs)))
    if not any(each.requires_grad for each in outputs):
        raise NoGradientError("no output has one in PyTorch")
    generator = np.random.RandomState(0)
    factors = [generator.standard_normal(each.shape).astype(np.float32) for each in outputs]
    sum((each * torch.tensor(factor)).sum() for each, factor in zip(outputs, factors, strict=True)).backward()
    wanted = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    module.zero_grad(set_to_none=True)
    return wanted, [own[at].grad for at in places], factors


def _apart(ours, theirs):
    pairs = [(_numbers(one), _numbers(other)) for one, other in zip(ours, theirs, strict=True)]
    sizes = [float(np.abs(other).max(initial=0.0)) for _, other in pairs]
    least = 0.01 * max(sizes, default=0.0) or 1.0
    apart = [
        float(np.abs(one - other).max(initial=0.0)) / max(size, least)
        for (one, other), size in zip(pairs, sizes, strict=True)
    ]
    return max(apart, default=0.0) if np.isfinite(apart).all() else float("inf")


def _gradient_rounding(module, leaves, tree, places, theirs):
    """The difference of PyTorch's gradients in float32 and float64; None where its code cannot compute them."""
    copied = _copied(module)
    try:
        leaves = [_double(leaf) for leaf in leaves]
        exact, inputs, _ = _own_gradients(copied.double(), leaves, tree, places)
        return _apart([*exact.values(), *inputs], theirs)
    except Exception:
        return None


def _floats(tensors):
    return [each for each in tensors if each.dtype in (torch.float32, torch.float64, jax.numpy.float32)]
