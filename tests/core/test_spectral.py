"""Inverse short-time Fourier transforms and their windows, as PyTorch computes them."""

import jax
import numpy as np
import pytest
import torch

from torchax_serve import InvalidArgumentError, UnsupportedModelError, extract_jax, to_jax


class Inverse(torch.nn.Module):
    def __init__(self, options, window=None):
        super().__init__()
        self.options = options
        self.register_buffer("window", window)

    def forward(self, x):
        options = dict(self.options)
        return torch.istft(input=torch.view_as_complex(x), n_fft=options.pop("n_fft"), window=self.window, **options)


HANN = torch.hann_window(16)
# (options, window, frequencies)
CASES = {
    "default": ({"n_fft": 16}, HANN, 9),
    "hop": ({"n_fft": 16, "hop_length": 5}, HANN, 9),
    "shorter window": ({"n_fft": 16, "hop_length": 3, "win_length": 10}, torch.hamming_window(10), 9),
    "no window": ({"n_fft": 16}, None, 9),
    "without center": ({"n_fft": 16, "center": False}, torch.hamming_window(16), 9),
    "normalized": ({"n_fft": 16, "normalized": True}, HANN, 9),
    "odd": ({"n_fft": 15}, torch.hamming_window(15), 8),
    "two sides": ({"n_fft": 16, "onesided": False}, HANN, 16),
    "complex": ({"n_fft": 16, "return_complex": True, "onesided": False}, HANN, 16),
    "short": ({"n_fft": 16, "length": 20}, HANN, 9),
    "long": ({"n_fft": 16, "length": 60}, torch.hamming_window(16), 9),
}


@pytest.mark.filterwarnings("ignore:The length of signal is shorter")  # PyTorch's, of the case "long"
@pytest.mark.filterwarnings("ignore:A window was not provided")  # the same, of "no window"
@pytest.mark.parametrize("name", CASES)
def test_inverse_transforms_are_those_of_pytorch(name):
    torch.manual_seed(0)
    options, window, num_frequencies = CASES[name]
    x = torch.randn(2, num_frequencies, 7, 2)
    module = Inverse(options, window)
    expected = module(x)
    torch.testing.assert_close(to_jax(module)(x), expected, rtol=1e-4, atol=1e-5)


def test_a_signal_comes_back_with_its_gradient():
    class Both(torch.nn.Module):
        def forward(self, x):
            window = torch.hann_window(16, device=x.device)
            spectrum = x.stft(16, hop_length=4, window=window, return_complex=True)
            return spectrum.istft(16, hop_length=4, window=window, length=x.shape[-1])

    x = torch.randn(3, 50)
    torch.testing.assert_close(to_jax(Both())(x), x, rtol=1e-4, atol=1e-5)
    weights, function = extract_jax(Both())
    gradient = jax.grad(lambda x: (function(weights, (x,)) ** 2).sum() / 2)(x.numpy())
    np.testing.assert_allclose(gradient, x, rtol=1e-4, atol=1e-4)


WINDOWS = ("hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window")


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_those_of_pytorch(name):
    function = getattr(torch, name)
    calls = [((size, periodic), {}) for size in (0, 1, 2, 7, 16) for periodic in (True, False)]
    calls.append(((9,), {"dtype": torch.float64}))
    calls += [((9, True, 0.5), {}), ((9, False, 0.5, 0.4), {})] if name == "hamming_window" else []
    calls += [((9, True), {"beta": 0.4}), ((9, False, 0.5), {})] if name == "kaiser_window" else []
    for args, kwargs in calls:

        def forward(x, args=args, kwargs=kwargs):
            return x.sum() * 0 + function(*args, **kwargs).to(torch.float32)

        expected = function(*args, **kwargs).to(torch.float32)
        torch.testing.assert_close(to_jax(forward)(torch.ones(2)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"n_fft": 16}, (2, 8, 7, 2), "istft: expected 9 frequencies of n_fft 16, got 8"),
        ({"n_fft": 16, "hop_length": 17}, (2, 9, 7, 2), "istft: expected 0 < hop_length <= win_length <= n_fft"),
        ({"n_fft": 16, "center": False}, (2, 9, 7, 2), "istft: expected windows whose sum is nowhere zero"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, shape, message):
    function = torch.istft
    spectrum, window = torch.view_as_complex(torch.randn(shape)), torch.hann_window(16)

    class Constant(torch.nn.Module):
        def forward(self, x):
            options_left = dict(options)
            return function(x, options_left.pop("n_fft"), window=window, **options_left)

    weights, run = extract_jax(Constant())
    with pytest.raises(InvalidArgumentError, match=message):
        run(weights, (spectrum,))
    with pytest.raises(RuntimeError):
        Constant()(spectrum)


@pytest.mark.parametrize("has_out", [False, True])
def test_results_whose_length_depends_on_values_name_the_operator(has_out):
    def forward(x):
        out = torch.empty(0)
        found = torch.masked_select(x, x > 0, out=out) if has_out else torch.masked_select(x, x > 0)
        return found * 2

    with pytest.raises(UnsupportedModelError) as error:
        to_jax(forward)(torch.randn(3, 4))
    assert "got masked_select, which reads a value (test_spectral.py:" in str(error.value)
    assert str(error.value).endswith("write it with torch.where, or leave this part in PyTorch")
