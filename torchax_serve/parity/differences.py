"""Measures how far a tensor of the JAX model is from eager PyTorch's, and judges it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

ERROR_RATIO = 3.0
"""Largest error of the JAX model in 16 bits that passes, in errors of eager PyTorch in 16 bits; both are measured
against eager float32. Real models with the same weights reach 1.5: sums in another order are rounded elsewhere."""

ERROR_WITH_OVERFLOW = 0.1
"""Largest relative error of the JAX model if eager PyTorch in 16 bits has overflowed and so is no measure."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Distance of one tensor of the JAX model from the reference.

    The reference is eager PyTorch, in the same dtype or in float32.

    Attributes:
        name: what the tensor is.
        largest: max of ``|jax - reference|``; infinite if shapes differ or a number is finite on one
            side only.
        relative: max of ``|jax - reference| / (|reference| + rms(reference))``, which neither a channel of huge values
            nor a value near zero dominates.
        within: whether it passes.
        error: in 16 bits, `position_error` of the JAX model against eager float32; None where a tolerance judges.
        eager_error: the same of eager PyTorch in 16 bits, or half a unit in the last place if that is more.
    """

    name: str
    largest: float
    relative: float
    within: bool
    error: float | None = None
    eager_error: float | None = None

    @classmethod
    def between(cls, name: str, ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> Difference:
        """Compares two tensors of one meaning, in float64; `tolerance` is on `relative`."""
        largest, relative = _gaps(ours, theirs)
        return cls(name, largest, relative, relative <= tolerance)

    @classmethod
    def from_float32(cls, name: str, ours: torch.Tensor, exact: torch.Tensor, eager_error: float) -> Difference:
        """Returns the difference of a tensor in 16 bits from the float32 one.

        It is judged by the error that eager PyTorch makes in 16 bits.
        """
        largest, relative = _gaps(ours, exact)
        error = position_error(ours, exact)
        eager_error = max(eager_error, torch.finfo(ours.dtype).eps / 2 if ours.element_size() == 2 else 0.0)
        is_finite = math.isfinite(eager_error)
        bound = ERROR_RATIO * eager_error if is_finite else ERROR_WITH_OVERFLOW
        is_within = error <= bound or (not is_finite and not math.isfinite(error))  # both overflow
        return cls(name, largest, relative, is_within, error, eager_error)


Named = dict[str, torch.Tensor]
"""Tensors of one side, by what they are."""


def within(tolerance: float, ours: Named, theirs: Named) -> tuple[Difference, ...]:
    """Compares all tensors of two sides by a tolerance on `Difference.relative`."""
    return tuple(Difference.between(name, *pair, tolerance) for name, pair in by_name(ours, theirs).items())


def by_name(ours: Named, theirs: Named) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pairs tensors of one name; with an empty one where a side has none."""
    absent = torch.empty(0)
    names = [*theirs, *(name for name in ours if name not in theirs)]
    return {name: (ours.get(name, absent), theirs.get(name, absent)) for name in names}


def position_error(values: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the root mean square over positions of ``|values - exact| / |exact|``.

    Norms are taken along the last axis. Each position counts as much as any other, so that one token of huge
    activations does not hide the rest. Infinite if shapes differ or a number is finite on one side only.
    """
    a, b = values.detach().double().numpy(), exact.detach().double().numpy()
    if a.shape != b.shape:
        return math.inf
    gap, finite = _gap(a, b)
    if not np.isfinite(gap).all():
        return math.inf
    norms = np.sqrt(np.sum(np.where(finite, b, 0.0) ** 2, axis=-1))
    errors = np.sqrt(np.sum(gap**2, axis=-1))
    with np.errstate(divide="ignore"):
        relative = np.where(errors > 0, errors / np.where(errors > 0, norms, 1.0), 0.0)
    return float(np.sqrt(np.mean(relative**2))) if relative.size else 0.0


def _gaps(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Returns `Difference.largest` and `Difference.relative`."""
    a, b = ours.detach().double().numpy(), theirs.detach().double().numpy()
    if a.shape != b.shape:
        return math.inf, math.inf
    gap, finite = _gap(a, b)
    rms = float(np.sqrt(np.mean(b[finite] ** 2))) if finite.any() else 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(gap > 0, gap / (np.where(finite, np.abs(b), 0.0) + rms), 0.0)
    return float(gap.max(initial=0.0)), float(relative.max(initial=0.0))


def _gap(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``|a - b|``, infinite where only one side is finite, and where `b` is finite."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities (masked logits) are equal to themselves
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(a - b))
    return np.where(np.isnan(gap), np.inf, gap), np.isfinite(b)
