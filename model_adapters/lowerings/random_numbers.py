"""Operators that draw random numbers.

torchax 0.0.13 takes the same ones in each call, does not write them, or mixes up their arguments and dtypes.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from model_adapters.bridge.views import DEVICE, default_env, jax_view, set_raw_lowering, set_view_lowering
from model_adapters.lowerings.written_results import write


def install() -> None:
    """Registers the lowerings in torchax's table."""
    aten = torch.ops.aten
    set_raw_lowering(aten.normal_, _normal_)
    set_view_lowering(aten.normal.float_float, _normal_of_numbers)
    for operator in (aten.random_, *(getattr(aten.random_, name) for name in aten.random_.overloads())):
        set_view_lowering(operator, _random_)
    set_view_lowering(aten.exponential_, _exponential_)
    set_view_lowering(aten.cauchy_, _cauchy_)
    for operator in (aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor):
        set_view_lowering(operator, _normal)
    set_view_lowering(aten.multinomial, _multinomial)
    set_view_lowering(aten.bernoulli.p, _bernoulli)
    set_view_lowering(aten.geometric_, _geometric_)
    _follow_generators()


def _uniform(shape: Any, generator: torch.Generator | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(tuple(shape), generator=generator, dtype=dtype, device=DEVICE)


def _normal_numbers(shape: Any, generator: torch.Generator | None, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=generator, dtype=dtype, device=DEVICE)


def _normal_(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> torch.Tensor:
    write(x, _normal_numbers(x.shape, generator, x.dtype) * std + mean)
    return x


def _random_(x: torch.Tensor, *limits: int, generator: Any = None, **named: int) -> torch.Tensor:
    limits = tuple(named.pop(name) for name in ("from", "to") if name in named) or limits
    low, high = limits if len(limits) == 2 else (0, *limits) if limits else (0, _num_exact(x))
    write(x, torch.randint(low, high, x.shape, generator=generator, device=DEVICE))
    return x


def _num_exact(x: torch.Tensor) -> int:
    """Returns up to which number all integers are exact in the dtype of `x`."""
    if x.dtype.is_floating_point:
        return int(2 / torch.finfo(x.dtype).eps)
    return 2 if x.dtype == torch.bool else min(torch.iinfo(x.dtype).max, 2**31 - 2) + 1


def _exponential_(x: torch.Tensor, lambd: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    write(x, -torch.log1p(-_uniform(x.shape, generator)) / lambd)
    return x


def _cauchy_(x: torch.Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    write(x, median + sigma * torch.tan(torch.pi * (_uniform(x.shape, generator) - 0.5)))
    return x


def _geometric_(x: torch.Tensor, p: float, *, generator: Any = None) -> torch.Tensor:
    tails = torch.log1p(-_uniform(x.shape, generator))
    write(x, torch.ceil(tails / torch.log1p(torch.full((), -p, device=DEVICE))).clamp(min=1))
    return x


def _normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> torch.Tensor:
    mean, std = torch.as_tensor(mean), torch.as_tensor(std)
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return _normal_numbers(shape, generator, (mean if mean.ndim else std).dtype) * std + mean


def _normal_of_numbers(
    mean: float, std: float, size: Any, *, dtype: torch.dtype | None = None, generator: Any = None, **kwargs: Any
) -> torch.Tensor:
    return _normal_numbers(size, generator, dtype) * std + mean


def _bernoulli(x: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> torch.Tensor:
    return (_uniform(x.shape, generator) < p).to(x.dtype)


def _multinomial(
    x: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> torch.Tensor:
    """Computes ``torch.multinomial``: the places of the largest logarithms with Gumbel noise.

    Each row has draws of its own.
    """
    if num_samples > x.shape[-1] and not replacement:
        raise RuntimeError(f"multinomial: expected at most {x.shape[-1]} samples without replacement")
    _check_weights(jax_view(x))
    logarithms = torch.log(x.to(torch.float32))
    if not replacement:
        noise = -torch.log(-torch.log(_uniform(x.shape, generator)))
        return torch.topk(logarithms + noise, num_samples)[1]
    noise = -torch.log(-torch.log(_uniform((*x.shape[:-1], num_samples, x.shape[-1]), generator)))
    return torch.argmax(logarithms.unsqueeze(-2) + noise, -1)


def _check_weights(weights: Any) -> None:
    """Raises RuntimeError if known `weights` [..., n] are no probabilities, as PyTorch does."""
    if isinstance(weights, jax.core.Tracer) or not weights.is_fully_addressable:
        return
    values = np.asarray(weights, np.float32)
    if not (np.isfinite(values) & (values >= 0)).all() or not values.sum(-1).all():
        raise RuntimeError("multinomial: expected finite weights of at least 0, and one above 0 in each row")


def _follow_generators() -> None:
    """Takes a seed from a generator at each draw: torchax 0.0.13 takes its first one each time."""
    env = default_env()
    theirs = env.get_and_rotate_prng_key

    def next_key(generator: torch.Generator | None = None) -> Any:
        if generator is None:
            return theirs()
        with no_dispatch(), torch._C.DisableTorchFunction():
            return jax.random.PRNGKey(int(torch.randint(2**31 - 1, (), generator=generator)))

    env.get_and_rotate_prng_key = next_key
