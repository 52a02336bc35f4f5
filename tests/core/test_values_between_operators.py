"""Code that decides by values which the model computes, and results that it keeps from one call for the next."""

import logging

import jax
import numpy as np
import pytest
import torch
import transformers
from view_checks import Module, check

from torchax_serve import UnsupportedModelError, extract_jax, to_jax


@pytest.fixture(scope="module")
def detector():
    """A keypoint detector: how many points an image has depends on its scores."""
    torch.manual_seed(0)
    sizes = {"encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16, "descriptor_decoder_dim": 16}
    return transformers.SuperPointForKeypointDetection(transformers.SuperPointConfig(**sizes)).eval()


def test_keypoints_are_those_of_torch_and_the_log_names_the_line(detector, caplog):
    images = [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))] * 2
    with torch.no_grad():
        expected = [detector(pixel_values=image) for image in images]
    on_jax = to_jax(detector)
    with caplog.at_level(logging.WARNING, "torchax_serve"):
        found = [on_jax(pixel_values=image) for image in images]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.mask, theirs.mask) and theirs.mask.any()
        for name in ("keypoints", "scores", "descriptors"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)
    (said,) = [each.getMessage() for each in caplog.records if "one by one" in each.getMessage()]
    assert "modeling_superpoint.py:" in said


READERS = {
    "bincount": lambda x: torch.bincount(x.long()),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "nonzero": lambda x: torch.nonzero(x),
    "argwhere": lambda x: torch.argwhere(x > 1),
    "masked_select": lambda x: x.masked_select(x > 1),
    "linalg_lstsq": lambda x: torch.linalg.lstsq(x.view(2, 2), x.view(2, 2)).solution,
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "code that": lambda x: x if x.sum() > 3 else -x,
    "code that ": lambda x: x * x[0].item(),
    "code that reads": lambda x: torch.from_numpy(x.numpy() + 1),
}


@pytest.mark.parametrize("name", READERS)
def test_what_reads_values_in_a_program_is_named_with_its_line(name):
    """Outside of a program it is what PyTorch computes."""
    values = np.array([3.0, 1.0, 1.0, 2.0], np.float32)
    weights, function = extract_jax(Module(READERS[name]))
    expected = READERS[name](torch.from_numpy(values.copy()))
    np.testing.assert_allclose(np.asarray(function(weights, (values,))), expected.numpy(), rtol=1e-5, atol=1e-6)
    operator = "nonzero" if name == "argwhere" else name
    with pytest.raises(
        UnsupportedModelError, match=rf"got {operator}.*test_values_between_operators\.py:\d+.*jax\.jit"
    ):
        jax.jit(function)(weights, (values,))


def test_a_tensor_as_a_size_is_named_with_its_line():
    weights, function = extract_jax(Module(lambda x: torch.zeros(x.long()[1])))
    with pytest.raises(UnsupportedModelError, match=r"got a tensor \(test_values.*py:\d+\); pass int\(tensor\)"):
        function(weights, (np.ones(3, np.float32),))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"correction": 0},
        {"fweights": torch.tensor([1, 2, 3])},
        {"aweights": torch.tensor([0.5, 1.5, 2.0])},
        {"fweights": torch.tensor([1, 2, 3]), "aweights": torch.tensor([0.5, 1.5, 2.0]), "correction": 2},
    ],
)
def test_covariances(options):
    def run(x):
        return torch.cov(x[0], **options), torch.cov(x[0, 0], **options), torch.corrcoef(x[0])

    check(run, torch.sin(torch.arange(24.0)).view(2, 4, 3))


class Counting(torch.nn.Module):
    """Names the end of a range, and the dtype of a tensor that is one already."""

    def forward(self, x):
        return torch.as_tensor(x > 0, dtype=torch.float32, device=x.device) + torch.arange(end=x.shape[-1])


def test_end_of_a_range_by_name_and_dtype_of_a_tensor():
    values = np.array([-1.0, 0.5, 2.0], np.float32)
    weights, function = extract_jax(Counting().eval())
    np.testing.assert_array_equal(function(weights, (values,)), Counting()(torch.from_numpy(values)).numpy())


def test_a_forward_that_returns_a_tensor_does_so_here():
    class Plain(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            return super().forward(input_ids=input_ids, use_cache=False).logits

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    model = Plain(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()
    ids = torch.tensor([[3, 7, 5, 9]])
    with torch.no_grad():
        expected = model(ids)
    found = to_jax(model)(ids, use_cache=False)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
