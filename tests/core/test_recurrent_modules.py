"""PyTorch's recurrent layers beside PyTorch: every kind, lengths that differ, packed sequences, gradients."""

import jax
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torchax_serve import UnsupportedModelError, extract_jax, to_jax

LAYERS = {
    "LSTM": lambda: torch.nn.LSTM(3, 4, 2, bidirectional=True),
    "LSTM, projected": lambda: torch.nn.LSTM(3, 4, proj_size=2, bias=False),
    "GRU": lambda: torch.nn.GRU(3, 4, 2, bidirectional=True, batch_first=True),
    "GRU without biases": lambda: torch.nn.GRU(3, 4, bias=False),
    "RNN": lambda: torch.nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}


def compared(module, *args):
    expected = jax.tree.leaves(module(*args))
    sum((each**2).sum() for each in expected if each.is_floating_point()).backward()
    weights, function = extract_jax(module)

    def loss(weights):
        found = jax.tree.leaves(function(weights, args))
        return sum((each**2).sum() for each in found if each.dtype == np.float32), found

    gradients, found = jax.jit(jax.grad(loss, has_aux=True))(weights)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-4, atol=1e-6)
    for name, each in module.named_parameters():
        np.testing.assert_allclose(gradients[name], each.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_as_pytorch_does(name):
    torch.manual_seed(0)
    compared(LAYERS[name](), torch.randn(2, 5, 3))


def test_a_state_is_taken_and_a_row_needs_no_batch():
    torch.manual_seed(0)
    compared(torch.nn.LSTM(3, 4), torch.randn(5, 3), (torch.randn(1, 4), torch.randn(1, 4)))


def test_a_program_has_a_step_once_for_all_lengths():
    weights, function = extract_jax(torch.nn.LSTM(3, 4))
    sizes = [len(str(jax.make_jaxpr(function)(weights, (np.zeros((time, 1, 3), np.float32),)))) for time in (8, 512)]
    assert sizes[1] < 1.1 * sizes[0]


class Packed(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths=(2, 3)):
        packed = pack_padded_sequence(x, torch.as_tensor(lengths), batch_first=True, enforce_sorted=False)
        output, state = self.layer(packed)
        return *pad_packed_sequence(output, batch_first=True, total_length=6), state


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_packed_sequences_end_at_their_own_length(name):
    torch.manual_seed(0)
    layer = getattr(torch.nn, name)(3, 4, bidirectional=True)
    x, lengths = torch.randn(3, 6, 3), torch.tensor([2, 5, 4])
    with torch.no_grad():
        expected = jax.tree.leaves(Packed(layer)(x, lengths))
    found = jax.tree.leaves(to_jax(Packed(layer))(x, lengths))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_packed_sequences_have_gradients():
    torch.manual_seed(0)
    compared(Packed(torch.nn.GRU(3, 4)), torch.randn(2, 3, 3))


def test_dropout_in_training_is_refused():
    weights, function = extract_jax(torch.nn.LSTM(3, 4, 2, dropout=0.5))
    with pytest.raises(UnsupportedModelError, match="without dropout, got"):
        function(weights, (torch.randn(5, 1, 3),))
