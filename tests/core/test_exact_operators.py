"""Operators over integers, narrow dtypes, NaN, empty lists of axes and axes from the end, beside PyTorch."""

import jax
import numpy as np
import pytest
import torch
from view_checks import Module

from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.views import to_torch_tensor
from model_adapters.errors import UnsupportedModelError

NAN, INF = float("nan"), float("inf")
F = torch.nn.functional
FLOATS = torch.tensor([[1.5, -2.25, 3.0, 4.0], [0.5, 7.0, -1.0, 2.0]])
ODD = torch.tensor([[1.5, -2.25, 3.0, NAN], [0.0, -0.0, INF, -INF]])
SHORT = FLOATS.bfloat16()
LARGE = torch.tensor([16777217, 40000001, -33554435, 7])
BYTES = torch.tensor([[0, 1, 250], [7, 255, 3]], dtype=torch.uint8)
NARROW = torch.tensor([100, 100, 100, -5], dtype=torch.int8)
SQUARE = torch.tensor([[0.5, -1.0, 2.0], [3.0, 1.0, 0.0], [-2.0, 1.5, 1.0]])
PLACES = torch.tensor([[0, 2], [1, 1]])

CASES = {
    "div by trunc": (lambda x: torch.div(x, 3, rounding_mode="trunc"), LARGE),
    "div by floor of int8": (lambda x: torch.div(x, 3, rounding_mode="floor"), NARROW),
    "fmod of large numbers": (lambda x: torch.fmod(x, 3.0), torch.tensor([1e10, 123456789.0, -5.3])),
    "fmod by infinity": (lambda x: torch.fmod(x, INF), FLOATS),
    "pow": (lambda x: x**9, torch.tensor([7, 3, -7])),
    "pow that wraps": (lambda x: x**2, BYTES),
    "pow of negative exponents": (lambda x: torch.pow(x, torch.tensor([-1, -2, -1, 3])), torch.tensor([1, -1, 2, 9])),
    "pow of truth values": (lambda x: x**2, BYTES > 5),
    "bits": (lambda x: (torch.ops.aten.__and__(x, 6), torch.ops.aten.__xor__(x, 6), x | 8), LARGE),
    "cumsum": (lambda x: (x.cumsum(0), x.cumprod(0), x.sum(), x.cumsum(0, dtype=torch.float32)), NARROW),
    "cumsum of bytes": (lambda x: (x.cumsum(1), x.sum(), x.any(), x[0, 1].cumsum(0)), BYTES),
    "smallest of bytes": (lambda x: x.topk(2, largest=False), BYTES),
    "smallest with the least": (lambda x: x.topk(2, 0, largest=False), torch.tensor([-(2**31), 5, 3])),
    "smallest with NaN": (lambda x: x.topk(3, largest=False)[0], ODD),
    "kthvalue": (lambda x: (*x.kthvalue(1), *x.kthvalue(4, keepdim=True)), torch.tensor([9, 1, -(2**31), 2, 7]).int()),
    "kthvalue with NaN": (lambda x: (x.kthvalue(2, 1)[0], x.kthvalue(4, 1)[0]), ODD),
    "cummax with NaN": (lambda x: (*x.cummax(0), *x.cummin(0)), torch.tensor([1, NAN, 3, NAN, 5])),
    "cummax of equal ones": (lambda x: (*x.cummax(-1), *x.cummin(-1)), torch.tensor([1, 2, 2, 1, 1, 2])),
    "medians of nothing": (lambda x: (x[:0].median(), x[:0].nanmedian()), FLOATS),
    "median": (lambda x: (x.median(), *x[:, None].median(0, keepdim=True)), LARGE),
    "median with NaN": (lambda x: (*x.nanmedian(1), x.median(1)[0]), torch.tensor([[NAN, 3, 1, 2], [NAN, NAN, 5, 4]])),
    "floats as narrow integers": (
        lambda x: (x.to(torch.uint8), x.char(), x.short(), x.bfloat16().byte()),
        torch.tensor([300.0, -5.75, -300.0, 7.5, 70000.0, -1e5]),
    ),
    "integers times floats": (
        lambda x: (
            torch.addmm(x, x, x, alpha=1.5, beta=2.5),
            torch.addmv(x[0], x, x[0], alpha=2.5, beta=0.5),
            torch.baddbmm(x[None], x[None], x[None], alpha=2.5),
            torch.addbmm(x, x[None], x[None], alpha=2.5, beta=1.5),
        ),
        torch.tensor([[1, 2], [3, 4]]),
    ),
    "sums of products of integers": (
        lambda x: (torch.addcmul(x, x, x, value=2.7), x.byte().addcmul_(x.byte(), x.byte(), value=3)),
        LARGE % 97,
    ),
    "incomplete gamma functions": (
        lambda x: (torch.igamma(x[:, None], x), torch.igammac(x[:, None], x)),
        torch.tensor([0.0, -0.0, 0.5, 3.0, 250.0, 255.0, 1e5, 1.005e5, 1e10, INF, NAN, -1.0]),
    ),
    "zeta": (
        lambda x: torch.special.zeta(x[:, None], x),
        torch.tensor([0.0, 1.0, 2.0, 3.5, 0.5, -1.0, -2.0, INF, NAN]),
    ),
    "quantiles at places of the host": (
        lambda x: (torch.quantile(x, torch.tensor([0.1, 0.5]), 1), x.nanquantile(torch.tensor(0.3))),
        FLOATS,
    ),
    "bits of complex numbers": (
        lambda x: (torch.complex(x, x + 1).view(torch.float32), x.view(torch.complex64).abs()),
        FLOATS,
    ),
    "mode": (lambda x: torch.mode(x, 1), torch.tensor([[3, 1, 3, 1], [2, 2, 5, 5]])),
    "sign": (lambda x: (x.sign(), x.sgn()), ODD),
    "copysign": (lambda x: torch.copysign(x, -1), LARGE % 5),
    "sigmoid of bytes": (lambda x: (x.sigmoid(), torch.erf(x), (x + 1).rsqrt()), BYTES),
    "functions of bytes": (lambda x: (x.sqrt(), x.sin(), (x + 1).log(), x.exp(), (x > 5).exp(), x.prod(1)), BYTES),
    "ldexp": (lambda x: (torch.ldexp(x, x), torch.ldexp(x, torch.tensor([1, -1, 2, 0]))), SHORT),
    "digamma": (lambda x: x.digamma(), torch.tensor([0.0, -0.0, -0.5, 1.0])),
    "erfcx": (lambda x: torch.special.erfcx(x), torch.tensor([0.0, -1.0, 5.0, 9.0, 30.0, 1e4])),
    "angle": (lambda x: (x.angle(), torch.angle(torch.complex(x, x + 1))), ODD[:, :2]),
    "own dtype": (lambda x: (x.lgamma(), torch.logit(x, eps=0.1)), SHORT),
    "no axes": (lambda x: (x.var(()), torch.std(x, dim=[]), *torch.var_mean(x, dim=())), FLOATS),
    "norm": (lambda x: (torch.linalg.vector_norm(x, 0, 1), torch.linalg.vector_norm(x, dim=())), FLOATS),
    "norm in float32": (lambda x: torch.linalg.vector_norm(x, dim=1, dtype=torch.float32), SHORT),
    "put": (lambda x: x.put(torch.tensor([0, -1, 0]), torch.tensor([1.0, 2.0, 3.0]), accumulate=True), FLOATS),
    "take_along_dim": (lambda x: torch.take_along_dim(x, torch.tensor([[9, -1], [-6, 2]]), 1), FLOATS),
    "slice_scatter": (lambda x: torch.slice_scatter(x, torch.ones(2, 1), -1, 1, 2), FLOATS),
    "diagonal_scatter": (lambda x: torch.diagonal_scatter(x, torch.ones(2), 0, -2, -1), FLOATS),
    "scatter of a number": (lambda x: x.scatter(1, PLACES, 2.0, reduce="multiply"), FLOATS),
    "sums of truth values": (lambda x: (x + x, x + True, x.sign(), x.index_add(0, PLACES[1], x)), BYTES > 5),
    "added truth values": (lambda x: x.scatter_add(1, PLACES, x[:, :2]), BYTES > 5),
    "reduced truth values": (lambda x: _scattered(x), BYTES > 5),
    "repeats": (lambda x: torch.repeat_interleave(x, torch.tensor([1, 2]), 0, output_size=3), FLOATS),
    "addmv without its sum": (lambda x: torch.addmv(x[:, 0] * NAN, x, x[0], beta=0), FLOATS),
    "parts at places": (lambda x: torch.tensor_split(x, x[0].long().abs()[:2].clamp(max=2), 1), FLOATS),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 0.5), LARGE),
    "bincount": (lambda x: torch.bincount(x, x), torch.tensor([1, 3, 1])),
    "logdet": (lambda x: torch.logdet(x), torch.tensor([[0.0, 1.0], [1.0, 0.0]])),
    "eigvalsh of a triangle": (lambda x: torch.linalg.eigvalsh(x, UPLO="U"), SQUARE),
    "cholesky_ex": (lambda x: torch.linalg.cholesky_ex(x)[1], torch.tensor([[1.0, 0.0], [0.0, -1.0]])),
    "pinv": (lambda x: torch.linalg.pinv(x, atol=3.0), SQUARE),
    "qr": (lambda x: torch.qr(x.T, some=False)[0].abs()[:, :2], FLOATS),
    "irfft2 of an odd length": (lambda x: torch.fft.irfft2(torch.complex(x, x), s=(2, 5)), FLOATS),
    "linspace": (lambda x: (torch.linspace(x[0, 0], x[0, 2], 4), torch.full((2,), x[0, 0])), FLOATS),
    "maxima of -inf": (lambda x: F.max_pool2d(x[None] * 0 - INF, 2, 1, 1, return_indices=True), SQUARE),
    "adaptive maxima": (lambda x: F.adaptive_max_pool2d(x[None], (2, 2), return_indices=True), SQUARE),
    "running statistics": (lambda x: _normalized(F.batch_norm, x), FLOATS),
    "of instances": (lambda x: _normalized(lambda x, *kept, **_: F.instance_norm(x.T[None], *kept), x), FLOATS),
    "operands without axes": (lambda x: (x + torch.tensor(0.1), torch.where(x > 0, x, torch.tensor(0.5))), SHORT),
    "a traced one": (lambda x: (x * x.float().mean(), torch.maximum(x, x.float().sum())), SHORT),
    "of a higher kind": (lambda x: (x + torch.tensor(0.5), x + torch.tensor(1, dtype=torch.int8)), LARGE % 9),
}


def _scattered(x):
    reduced = [x.scatter_reduce(1, PLACES, x[:, 1:], "amax", include_self=kept) for kept in (True, False)]
    return [*reduced, x.scatter_reduce(1, PLACES, x[:, 1:], "sum"), x.scatter_reduce(1, PLACES, x[:, 1:], "prod")]


def _normalized(norm, x):
    mean, var = x[0] * 0, x[0] * 0 + 1
    return norm(x, mean, var, training=True), mean, var


def _arrays(function, x):
    weights, extracted = extract_jax(Module(function))
    found = extracted(weights, (x.clone(),))
    return [
        to_torch_tensor(jax.numpy.asarray(each)) for each in (found if isinstance(found, tuple | list) else [found])
    ]


@pytest.mark.filterwarnings("ignore:torch.qr is deprecated")
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_exact(name):
    function, x = CASES[name]
    expected = function(x.clone())
    expected = expected if isinstance(expected, tuple | list) else [expected]
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
    for one, other in zip(_arrays(function, x), expected, strict=True):
        assert one.dtype == narrow.get(other.dtype, other.dtype)
        exact = not other.is_floating_point()
        limits = {"atol": 0, "rtol": 0} if exact else {"atol": 1e-5, "rtol": 8e-3 if other.itemsize == 2 else 1e-5}
        torch.testing.assert_close(one.to(other.dtype), other, equal_nan=True, **limits)


@pytest.mark.parametrize("name", ["max", "sort", "topk", "frexp", "aminmax", "kthvalue"])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_results_with_names_come_back_with_them(name, is_jitted):
    options = {"topk": (2,), "kthvalue": (1,), "max": (0,), "sort": (0,)}.get(name, ())
    x = torch.tensor([3.0, 1.0, 2.0, 5.0])
    expected = getattr(torch, name)(x, *options)
    weights, function = extract_jax(Module(lambda x: {"found": getattr(torch, name)(x, *options)}))
    found = (jax.jit(function) if is_jitted else function)(weights, (x.numpy(),))["found"]
    assert type(found) is type(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.where(x > 3, x, -1), lambda x: x.index_fill(0, torch.tensor([0]), -1), lambda x: x.long() + 2**31],
)
def test_numbers_beyond_a_dtype_are_refused_by_name(function):
    weights, extracted = extract_jax(Module(function))
    with pytest.raises(UnsupportedModelError, match="expected a number that its tensors' dtype holds"):
        extracted(weights, (BYTES,))


def test_numbers_are_drawn_anew_and_from_the_range():
    def run(x):
        drawn = [torch.empty_like(x).exponential_(2.0), torch.empty_like(x).exponential_(2.0)]
        rows = [torch.empty_like(x).random_(2, 10), torch.empty_like(x).random_(3), torch.normal(x, x * 0)]
        return [*drawn, *rows, torch.empty_like(x).cauchy_(), torch.empty_like(x).cauchy_()]

    one, other, between, below, exact, first, second = _arrays(run, torch.ones(400, 50))
    assert not torch.equal(one, other) and not torch.equal(first, second)
    assert abs(one.mean() - 0.5) < 0.02 and abs(first.median()) < 0.05
    assert set(between.unique().tolist()) == set(range(2, 10)) and set(below.unique().tolist()) == {0.0, 1.0, 2.0}
    assert (exact == 1).all()


def test_a_generator_is_followed():
    def run(x, generator):
        return [torch.rand(4, generator=generator, device=x.device), x.new_empty(4).normal_(generator=generator)]

    generator = torch.Generator().manual_seed(3)
    first, second = (torch.stack(_arrays(lambda x: run(x, generator), FLOATS)) for _ in range(2))
    generator.manual_seed(3)
    assert torch.equal(torch.stack(_arrays(lambda x: run(x, generator), FLOATS)), first)
    assert not torch.equal(first, second)


def test_rows_have_draws_of_their_own():
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0]).expand(4000, 4)
    several, one, heads = _arrays(
        lambda x: [torch.multinomial(x, 2), torch.multinomial(x, 1, replacement=True), torch.bernoulli(x, 0.25)],
        weights,
    )
    assert set(several.flatten().tolist()) == set(one.flatten().tolist()) == {1, 2}
    assert (several[:, 0] != several[:, 1]).all()
    for drawn in (several[:, 0], one[:, 0]):
        assert abs((drawn == 2).float().mean() - 0.75) < 0.03
    assert heads.dtype == weights.dtype and abs(heads.mean() - 0.25) < 0.02


_FAR = torch.tensor([9])
REFUSED = {
    "mean of integers": lambda x: LARGE.to(x.device).add(x.long()[0]).mean(),
    "var of integers": lambda x: x.long().var(),
    "softmax of integers": lambda x: x.long().softmax(-1),
    "a number beyond an axis": lambda x: x[2],
    "one from its end": lambda x: x[..., -5],
    "a step backwards": lambda x: x[:, ::-1],
    "index": lambda x: x[_FAR],
    "index of two axes": lambda x: x[PLACES[:1, 0], _FAR],
    "written index": lambda x: x.__setitem__(_FAR, 1.0),
    "index_put": lambda x: x.index_put((_FAR,), torch.tensor(1.0)),
    "index_select": lambda x: x.index_select(0, torch.tensor([-1])),
    "gather": lambda x: x.gather(1, _FAR[None]),
    "gather of a longer shape": lambda x: x.gather(0, torch.zeros(2, 5, dtype=torch.long)),
    "take": lambda x: x.take(_FAR),
    "put": lambda x: x.put(_FAR, torch.tensor([1.0])),
    "embedding": lambda x: F.embedding(_FAR, x),
    "one_hot": lambda x: F.one_hot(x.long() + 3, 2),
    "scatter": lambda x: x.scatter(1, _FAR[None], 1.0),
    "scatter_add": lambda x: x.scatter_add(1, _FAR[None], x[:1, :1]),
    "scatter_reduce": lambda x: x.scatter_reduce(1, -_FAR[None], x[:1, :1], "sum"),
    "index_add": lambda x: x.index_add(0, _FAR, x[:1]),
    "index_copy": lambda x: x.index_copy(0, _FAR, x[:1]),
    "division by 0": lambda x: x.long() // 0,
    "remainder by 0": lambda x: x.long() % torch.zeros(4, dtype=torch.long),
    "floats into integers": lambda x: x.long().add_(1.5),
    "a quotient into integers": lambda x: x.long().div_(2),
    "difference of truth values": lambda x: (x > 0) - (x > 1),
    "kthvalue": lambda x: x.kthvalue(5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses_is_an_error(name):
    weights, extracted = extract_jax(Module(REFUSED[name]))
    errors = (RuntimeError, IndexError, ValueError, ZeroDivisionError)
    with pytest.raises(errors):
        REFUSED[name](FLOATS.clone())
    with pytest.raises(errors, match="expected"):
        extracted(weights, (FLOATS.clone(),))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: F.embedding(torch.tensor([0]), x, max_norm=1.0), "expected no max_norm"),
        (lambda x: x.int() ** -1, "exponent of at least 0"),
        (lambda x: F.interpolate(x.byte()[None, None], (3, 3), mode="bilinear"), "interpolate: expected floats"),
        (lambda x: x.chalf(), "torch.complex32: expected a dtype that JAX has"),
    ],
)
def test_what_is_not_computed_is_refused(function, message):
    weights, extracted = extract_jax(Module(function))
    with pytest.raises(UnsupportedModelError, match=message):
        extracted(weights, (FLOATS,))


def test_derivatives_of_cumulative_logarithms():
    x = torch.tensor(np.random.default_rng(0).normal(size=(9, 3)) * 4, dtype=torch.float64, requires_grad=True)
    factors = torch.arange(27.0).view(9, 3) - 8
    (wanted,) = torch.autograd.grad((torch.logcumsumexp(x, 0) * factors).sum(), x)
    weights, extracted = extract_jax(Module(lambda x: torch.logcumsumexp(x, 0)))
    gradient = jax.jit(jax.grad(lambda x: (extracted(weights, (x,)) * factors.numpy()).sum()))
    found = gradient(x.detach().float().numpy())
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_attention_of_one_query_over_many_keys():
    queries, keys = torch.randn(1, 1, 3, 8), torch.randn(4, 2, 6, 8)
    weights, extracted = extract_jax(Module(lambda x: F.scaled_dot_product_attention(x, keys, keys)))
    expected = F.scaled_dot_product_attention(queries, keys, keys)
    torch.testing.assert_close(to_torch_tensor(extracted(weights, (queries,))), expected, atol=1e-5, rtol=1e-5)


def test_what_is_computed_on_the_host_stays_there():
    """transformers' masks are functions of indices, which are evaluated while a model is traced."""
    found = []

    def forward(x):
        index = torch.arange(4)
        found.append((index > 1) & index.new_ones((), dtype=torch.bool))
        return x + 1

    _, function = extract_jax(Module(forward))
    function({}, (np.ones(4, np.float32),))
    assert type(found[0]) is torch.Tensor
