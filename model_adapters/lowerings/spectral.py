"""Lowerings of the inverse short-time Fourier transform, and of windows for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.views import set_lowering
from model_adapters.errors import InvalidArgumentError

_LOWEST = 1e-11
"""Sums of squared windows below which PyTorch refuses to divide by them."""


def install() -> None:
    """Registers the lowerings in torchax's table."""
    operators: tuple[Any, ...] = (torch.istft, torch.Tensor.istft, torch.ops.aten.istft)
    for operator in operators:
        set_lowering(operator, _istft)
    for function, samples in (
        (torch.hann_window, lambda x: 0.5 - 0.5 * np.cos(x)),
        (torch.blackman_window, lambda x: 0.42 - 0.5 * np.cos(x) + 0.08 * np.cos(2 * x)),
        (torch.bartlett_window, lambda x: 1 - np.abs(x / np.pi - 1)),
    ):
        set_lowering(function, _window(samples))
    set_lowering(torch.ops.aten._fft_c2r, _fft_c2r)
    set_lowering(torch.hamming_window, _window(_hamming))
    set_lowering(torch.kaiser_window, _window(_kaiser))


def _hamming(x: np.ndarray, alpha: float = 0.54, beta: float = 0.46) -> np.ndarray:
    return alpha - beta * np.cos(x)


def _kaiser(x: np.ndarray, beta: float = 12.0) -> np.ndarray:
    place = x / np.pi - 1  # from -1 to 1
    found: np.ndarray = np.i0(beta * np.sqrt(np.maximum(0, 1 - place**2))) / np.i0(beta)
    return found


def _window(samples: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Returns the lowering of a window, whose samples are a function of angles from 0 to 2 pi.

    Its values are constants of the program.
    """

    def window(
        window_length: int, periodic: bool = True, *shape: float, dtype: Any = None, **options: Any
    ) -> jax.Array:
        named = {key: options[key] for key in ("alpha", "beta") if key in options}
        kind = str(torch.get_default_dtype() if dtype is None else dtype).removeprefix("torch.")
        if window_length == 1:
            return jnp.ones(1, kind)
        angles = 2 * np.pi * np.arange(window_length) / max(1, window_length - (not periodic))
        return jnp.asarray(samples(angles, *shape, **named).astype(kind))

    return window


def _istft(
    input: jax.Array,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: jax.Array | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> jax.Array:
    """Computes ``torch.istft`` of `input` [..., frequency, frame].

    Where windows leave a sample without weight, PyTorch raises; a program, which knows no values, has nan there.
    """
    spectrum = input
    hop, size = hop_length or n_fft // 4, win_length or n_fft
    weights = jnp.ones(size, spectrum.real.dtype) if window is None else window
    _check(spectrum, n_fft, hop, size, weights, onesided)
    before = (n_fft - size) // 2
    weights = jnp.pad(weights, (before, n_fft - size - before))
    norm = "ortho" if normalized else "backward"
    frames = jnp.moveaxis(spectrum, -1, -2)  # [..., frame, frequency]
    if return_complex:
        parts = jnp.fft.ifft(frames, n_fft, norm=norm)
    else:
        parts = jnp.fft.irfft(frames[..., : n_fft // 2 + 1], n_fft, norm=norm)
    total = n_fft + hop * (frames.shape[-2] - 1)
    places = hop * np.arange(frames.shape[-2])[:, None] + np.arange(n_fft)
    signal = jnp.zeros((*parts.shape[:-2], total), parts.dtype).at[..., places].add(parts * weights)
    sums = jnp.zeros(total, weights.dtype).at[places].add(jnp.broadcast_to(weights**2, places.shape))
    begin = n_fft // 2 if center else 0
    end = begin + length if length is not None else total - begin
    signal, sums = signal[..., begin:end], jnp.abs(sums[begin:end])
    if not isinstance(sums, jax.core.Tracer) and bool((sums < _LOWEST).any()):
        raise InvalidArgumentError("istft: expected windows whose sum is nowhere zero, got others; overlap them more")
    signal = signal / jnp.where(sums < _LOWEST, jnp.nan, sums)
    return jnp.pad(signal, [(0, 0)] * (signal.ndim - 1) + [(0, max(0, end - total))])


def _check(spectrum: jax.Array, n_fft: int, hop: int, size: int, window: jax.Array, onesided: bool | None) -> None:
    """Raises InvalidArgumentError for sizes that do not fit together."""
    if not jnp.iscomplexobj(spectrum) or spectrum.ndim not in (2, 3):
        raise InvalidArgumentError(
            f"istft: expected complex numbers [batch, frequency, frame], got {spectrum.dtype}{list(spectrum.shape)}"
        )
    wanted = n_fft // 2 + 1 if (spectrum.shape[-2] != n_fft if onesided is None else onesided) else n_fft
    if spectrum.shape[-2] != wanted:
        raise InvalidArgumentError(f"istft: expected {wanted} frequencies of n_fft {n_fft}, got {spectrum.shape[-2]}")
    if not 0 < hop <= size <= n_fft or window.shape != (size,):
        raise InvalidArgumentError(
            f"istft: expected 0 < hop_length <= win_length <= n_fft and a window of win_length, got {hop}, {size}, "
            f"{n_fft} and a window {list(window.shape)}"
        )


def _fft_c2r(x: jax.Array, dim: Any, normalization: int, last_dim_size: int) -> jax.Array:
    """Computes inverse transforms to real numbers, also of several axes and odd lengths."""
    norm = ("forward", "ortho", "backward")[normalization]
    x = jnp.fft.ifftn(x, axes=tuple(dim[:-1]), norm=norm) if len(dim) > 1 else x
    return jnp.fft.irfft(x, n=last_dim_size, axis=dim[-1], norm=norm)
