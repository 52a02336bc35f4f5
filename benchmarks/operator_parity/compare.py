"""Comparison of one operator, as JAX computes it, with PyTorch.

The samples are those of PyTorch's own tests (OpInfo): tensors of float32 or another dtype, and what else the operator
takes. Results of 16 bits are compared by units of their last place, and with those in float64.
"""

import importlib.util
import sys
import types
import unittest
import unittest.mock
import warnings

import jax
import numpy as np
import torch
from torch.utils import _pytree

from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.views import to_torch_tensor
from model_adapters.errors import UnsupportedModelError

SAME, REFUSED, DIFFERS, FAILS = "same", "refused", "differs", "fails"
"""Outcomes of a sample: equal results, an error that names the operator, other numbers, another error."""
TOLERANCE = 1e-4
"""Largest difference of results, absolute and relative, in float32: factorizations and sums in another order."""
OF_LARGEST = 2e-6
"""Largest difference over the largest number of a result: 16 roundings, of what large numbers cancel to."""
UNITS = 2
"""Largest difference of results of 16 bits in units of the last place, unless PyTorch's are as far from float64."""
STEP, MOST_DIFFERENCES = 1e-5, 200
"""Of differences in float64 that decide about gradients: their step, and of how many numbers they are taken."""
DRAWS = [
    "bernoulli",
    "cauchy",
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "dropout2d",
    "dropout3d",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "normal",
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "randint",
    "randint_like",
    "rrelu",
    "uniform",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "pca_lowrank",
    "svd_lowrank",
]
"""Operators that draw random numbers, by the last part of their name: each library has a generator of its own."""
UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operators whose results have no values yet."""


def all_operators(dtype=torch.float32):
    """Returns PyTorch's descriptions of operators that take `dtype`, by name and variant."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:  # of unused test classes
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    found = {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}
    return {name: op for name, op in found.items() if op.supports_dtype(dtype, "cpu") and not _is_left_out(op)}


def _is_left_out(op):
    last = op.name.rpartition(".")[2]
    return last in DRAWS or last in UNSET


class Call(torch.nn.Module):
    """A module that applies an operator to its tensors and the sample's other arguments."""

    def __init__(self, function, sample):
        super().__init__()
        leaves, self._spec = _pytree.tree_flatten(([sample.input, *sample.args], dict(sample.kwargs)))
        self._function, self._leaves = function, leaves
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def tensors(self):
        """The tensors among the arguments."""
        return [self._leaves[place] for place in self._places]

    def forward(self, *tensors):
        """Returns the results that are tensors."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        result = self._function(*args, **kwargs)
        kinds = (torch.Tensor, bool, int, float)
        return tuple(torch.as_tensor(each) for each in _pytree.tree_leaves(result) if isinstance(each, kinds))


def check_operator(op, max_samples, max_gradients, dtype=torch.float32):
    """Returns how often each outcome came, and the first message of each outcome other than `SAME`.

    At most `max_samples` samples are checked, spread evenly over all. In float32 the gradients of `max_gradients` are,
    too.
    """
    counts, messages = {}, {}
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    chosen = sorted({round(x) for x in np.linspace(0, len(samples) - 1, min(max_samples, len(samples)))})
    for number, place in enumerate(chosen):
        with_gradient = number < max_gradients and op.supports_autograd and dtype == torch.float32
        for outcome, message in check_sample(op, samples[place], with_gradient):
            counts[outcome] = counts.get(outcome, 0) + 1
            if outcome != SAME:
                messages.setdefault(outcome, message)
    return counts, messages


def check_sample(op, sample, with_gradient):
    """Returns the outcome and message of the forward, and of the gradient if there is one."""

    def function(*args, **kwargs):
        return sample.output_process_fn_grad(op.op(*args, **kwargs))

    module = Call(function, sample)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            expected = module(*(each.clone() for each in module.tensors))
            with unittest.mock.patch.object(torch, "manual_seed", lambda seed: None):  # some samples set one
                again = module(*(each.clone() for each in module.tensors))
    except Exception:
        return []  # what PyTorch itself does not compute so
    if any(not each.is_sparse_csr for each in again) and _difference(again, expected):
        return []  # it draws numbers, as attention with dropout does
    outcomes = [_outcome(lambda: _forward(module), lambda: expected, lambda: _in_float64(module, expected))]
    if with_gradient and outcomes[0][0] == SAME and any(each.is_floating_point() for each in expected):
        try:
            wanted = _torch_gradients(module)
        except Exception:
            return outcomes
        outcomes.append(_outcome(lambda: _jax_gradients(module), lambda: wanted))
        if outcomes[1][0] == DIFFERS and sum(each.numel() for each in module.tensors) <= MOST_DIFFERENCES:
            outcomes[1] = _outcome(lambda: _jax_gradients(module), lambda: _differences(module))
    return outcomes


def _in_float64(module, expected):
    """Returns PyTorch's results in float64 where they have 16 bits; None if it has none."""
    if not any(_is_narrow(each) for each in expected):
        return None
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return module(*(each.double() if _is_narrow(each) else each.clone() for each in module.tensors))
    except Exception:
        return None


def _outcome(compute, wanted, exact=lambda: None):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = compute()
    except (UnsupportedModelError, NotImplementedError) as error:
        return REFUSED, str(error).splitlines()[0][:150]
    except Exception as error:
        return FAILS, f"{type(error).__name__}: {error}".splitlines()[0][:150]
    difference = _difference(found, wanted(), exact)
    return (DIFFERS, difference) if difference else (SAME, "")


def _forward(module):
    weights, function = extract_jax(module)
    return [to_torch_tensor(each) for each in function(weights, tuple(module.tensors))]


def _is_varied(tensor):
    return tensor.dtype == torch.float32


def _cotangents(results):
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(each.shape, generator=generator) if _is_varied(each) else None for each in results]


def _torch_gradients(module):
    inputs = [each.clone().requires_grad_(_is_varied(each)) for each in module.tensors]
    results = [each for each in module(*inputs) if _is_varied(each) and each.requires_grad]
    total = sum((each * factor).sum() for each, factor in zip(results, _cotangents(results), strict=True))
    varied = [each for each in inputs if each.requires_grad]
    found = torch.autograd.grad(total, varied, allow_unused=True)
    found = [each.to_dense() if each is not None and each.is_sparse else each for each in found]
    return [torch.zeros_like(x) if each is None else each for x, each in zip(varied, found, strict=True)]


def _differences(module):
    """Returns the gradients as differences of the results in float64.

    They decide where PyTorch's own differ: of `as_strided_scatter` it has others than 0 for numbers that are
    overwritten, of `logcumsumexp` it loses digits in float32.
    """
    inputs = [each.double() if _is_varied(each) else each for each in module.tensors]
    own = module(*(each.clone().requires_grad_(each.dtype == torch.float64) for each in inputs))
    factors = [x for x in own if x.dtype == torch.float64 and x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    factors = [torch.rand(each.shape, generator=generator).double() for each in factors]

    def total():
        with torch.no_grad():
            results = [x for x, like in zip(module(*inputs), own, strict=True) if like.requires_grad]
        return float(sum((each * factor).sum() for each, factor in zip(results, factors, strict=True)))

    found = []
    for tensor in (each for each in inputs if each.dtype == torch.float64):
        slopes, flat = torch.zeros_like(tensor), tensor.view(-1)
        for place, value in enumerate(flat.tolist()):
            ends = []
            for step in (STEP, -STEP):
                flat[place] = value + step
                ends.append(total())
            flat[place] = value
            slopes.view(-1)[place] = (ends[0] - ends[1]) / (2 * STEP)
        found.append(slopes)
    return found


def _jax_gradients(module):
    weights, function = extract_jax(module)
    tensors = module.tensors
    places = [place for place, each in enumerate(tensors) if _is_varied(each)]
    with torch.enable_grad():
        own = module(*(each.clone().requires_grad_(_is_varied(each)) for each in tensors))
    kept = [place for place, each in enumerate(own) if _is_varied(each) and each.requires_grad]
    factors = [factor.numpy() for factor in _cotangents([own[place] for place in kept])]

    def total(*varied):
        given = list(tensors)
        for place, array in zip(places, varied, strict=True):
            given[place] = array
        results = function(weights, tuple(given))
        return sum((results[place] * factor).sum() for place, factor in zip(kept, factors, strict=True))

    found = jax.grad(total, tuple(range(len(places))))(*(jax.numpy.asarray(tensors[place].numpy()) for place in places))
    return [to_torch_tensor(each) for each in found]


def _is_narrow(tensor):
    return tensor.is_floating_point() and tensor.itemsize == 2


def _of_units(found, expected, exact):
    """Returns by how many units of its last place a result of 16 bits is off.

    Numbers as near to `exact` as PyTorch's count as equal.
    """
    limits = torch.finfo(expected.dtype)
    one, other = found.double(), expected.double()
    unit = limits.eps * 2.0 ** torch.floor(torch.log2(other.abs().clamp(limits.smallest_normal)))
    equal = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(equal, 0.0, ((one - other).abs() / unit).nan_to_num(torch.inf))
    if exact is not None and exact.shape == other.shape:
        exact = exact.double()
        ours, theirs = (torch.where(each == exact, 0.0, (each - exact).abs()) for each in (one, other))
        is_as_near = (ours <= theirs.nan_to_num(0.0, 0.0).max()) | (ours <= UNITS * unit)
        apart = torch.where(is_as_near, 0.0, apart)
    return float(apart.max())


def _difference(found, expected, exact=lambda: None):
    """Returns in words how results differ, or an empty string.

    `exact` computes those in float64.
    """
    if len(found) != len(expected):
        return f"{len(found)} results, PyTorch has {len(expected)}"
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if tuple(one.shape) != tuple(other.shape):
            return f"shape {tuple(one.shape)}, PyTorch has {tuple(other.shape)}"
        other = other.detach().resolve_conj().resolve_neg()
        if _narrowed(other.dtype) != _narrowed(one.dtype):
            return f"{one.dtype}, PyTorch has {other.dtype}"
        if _is_narrow(other) and other.numel():
            if _of_units(one, other, None) > UNITS:
                known = exact()
                units = _of_units(one, other, None if known is None else known[place])
                if units > UNITS:
                    return f"values, by {units:.3g} units of the last place"
            continue
        one, other = (each.to(torch.complex64) if each.is_complex() else each.double() for each in (one, other))
        largest = float(other.abs().nan_to_num(0, 0).max()) if other.numel() else 0.0
        limits = {"rtol": TOLERANCE, "atol": max(TOLERANCE, OF_LARGEST * largest), "equal_nan": True}
        if not np.allclose(one.numpy(), other.numpy(), **limits):
            apart = (one - other).abs().nan_to_num(nan=float("inf")).max()
            return f"values, by {float(apart):.3g}"
    return ""


def _narrowed(dtype):
    """Returns the dtype that stands for `dtype` in JAX without 64-bit types."""
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}
    return narrow.get(dtype, dtype)
