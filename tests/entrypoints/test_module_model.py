"""`ModuleModel`: rows and lengths of several callers beside eager PyTorch, and what padding may not change."""

import asyncio
import concurrent.futures
import copy
import inspect
from typing import Annotated

import hypothesis
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies

from model_adapters.bridge.views import to_torch_tensor
from model_adapters.ops.compressed_weight import unpacked
from model_adapters.ops.quantized_weight import QuantizedWeight
from torchax_serve import (
    DeadlineError,
    InvalidArgumentError,
    ModuleModel,
    TorchaxServeError,
    UnsupportedModelError,
    serve,
)
from torchax_serve.modules.named_dims import NamedCall, bucket_of, joined


class Tagger(torch.nn.Module):
    """Halves the length of a series; returns two tensors."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = torch.nn.Conv1d(4, 8, 3, stride=2, padding=1), torch.nn.Linear(8, 3)

    def forward(self, x: Annotated[torch.Tensor, "batch", "time", None], scale: float = 1.0):
        mixed = self.mix(x.transpose(1, 2)).transpose(1, 2)
        return {"tags": self.head(mixed.relu()) * scale, "mixed": mixed, "scale": scale}


@pytest.fixture(scope="module")
def tagger():
    torch.manual_seed(0)
    with serve(Tagger()) as model:
        yield model


def eager(model, x, scale=1.0):
    own = Tagger()
    own.load_state_dict(model.torch_model.state_dict())
    with torch.no_grad():
        return own(x, scale)


def test_calls_of_several_threads_get_their_own_rows_and_lengths(tagger):
    assert isinstance(tagger, ModuleModel) and tagger.dims == {"x": ("batch", "time", None)}
    inputs = [torch.randn(rows, length, 4) for rows, length in ((1, 5), (2, 9), (1, 16), (3, 7), (1, 23), (40, 6))]
    with concurrent.futures.ThreadPoolExecutor(len(inputs)) as pool:
        found = list(pool.map(lambda x: tagger(x, scale=2.0), inputs))
    for x, ours in zip(inputs, found, strict=True):
        theirs = eager(tagger, x, 2.0)
        assert ours["scale"] == 2.0
        for name in ("tags", "mixed"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_few_programs_are_compiled(tagger):
    programs = tagger.torch_model._jax_runtime.programs
    tagger(torch.randn(1, 40, 4))
    before = programs.num_traces
    for length in range(33, 64):
        tagger(torch.randn(1, length, 4))
    assert programs.num_traces == before


def test_calls_can_be_awaited_and_have_deadlines(tagger):
    x = torch.randn(1, 5, 4)
    found = asyncio.run(tagger.arun([x]))
    torch.testing.assert_close(found["tags"], eager(tagger, x)["tags"], rtol=1e-4, atol=1e-5)
    with pytest.raises(DeadlineError):
        tagger.run([x], timeout_s=1e-9)


def test_results_follow_a_module_that_changes():
    with ModuleModel(torch.nn.Sequential(torch.nn.Linear(4, 3)), dims={"input": ("batch", "time", None)}) as model:
        x = torch.randn(1, 5, 4)
        assert model(x).shape == (1, 5, 3)
        model.torch_model[0] = head = torch.nn.Linear(4, 5)
        torch.testing.assert_close(model(x), head(x).detach(), rtol=1e-4, atol=1e-5)
        head.weight, head.bias = torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.ones(6))
        torch.testing.assert_close(model(x), head(x).detach(), rtol=1e-4, atol=1e-5)


class Derived(transformers.PreTrainedModel):
    """A model of another library, with a forward that transformers does not call."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.head = torch.nn.Linear(4, 2)
        self.post_init()

    def forward(self, context):
        return self.head(context)


class Described(torch.nn.Linear):
    @property
    def config(self):
        return {"a": 1}


@pytest.mark.parametrize("module", [Derived(transformers.PretrainedConfig()), Described(4, 2)])
def test_modules_with_configurations_of_their_own_are_served(module):
    x = torch.randn(3, 4)
    with torch.no_grad():
        expected = module(x)
    with serve(module) as model:
        assert isinstance(model, ModuleModel)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


class First(torch.nn.Module):
    """Reads a value: how many columns are kept."""

    def forward(self, x, number):
        return x[:, : int(number[0])] * 2


@pytest.mark.parametrize("dims", [{}, {"x": ("batch", None)}, {"x": ("time", None)}])
def test_code_that_reads_integers_is_served(dims):
    with ModuleModel(First(), dims=dims) as model:
        for number in (2, 3):
            x = torch.randn(3, 5)
            assert torch.equal(model(x, torch.tensor([number])), x[:, :number] * 2)


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean(1)


class Loss(torch.nn.Module):
    def forward(self, x):
        return x.mean()


@pytest.mark.parametrize(
    ("module", "dims", "x", "message"),
    [
        (Mean(), ("batch", "time"), torch.ones(2, 5), "do not depend on zeros behind time or on other rows"),
        (Loss(), ("batch", None), torch.ones(2, 5), "first dimension is that of the rows"),
    ],
)
def test_results_that_padding_changes_are_refused(module, dims, x, message):
    with ModuleModel(module, dims={"x": dims}) as model, pytest.raises(UnsupportedModelError, match=message):
        model(x)


def test_bad_arguments_are_named(tagger):
    with pytest.raises(
        InvalidArgumentError, match=r"expected 3 dimensions \(batch, time, None\), got the shape \(2, 4\)"
    ):
        tagger(torch.ones(2, 4))
    with pytest.raises(InvalidArgumentError, match="missing a required argument: 'x'"):
        tagger()
    with pytest.raises(InvalidArgumentError, match=r"expected arguments of forward \(x\), got 'y'"):
        ModuleModel(Mean(), dims={"y": ("batch",)})
    with pytest.raises(InvalidArgumentError, match="expected a name or None for each dimension"):
        ModuleModel(Mean(), dims={"x": "batch"})
    with pytest.raises(InvalidArgumentError, match="dtype: expected no such argument for a Mean"):
        serve(Mean(), dtype="bfloat16")
    with pytest.raises(InvalidArgumentError, match="quantization: expected linear layers to quantize, got none"):
        serve(Mean(), quantization="int8")
    model = serve(Mean())
    model.close()
    with pytest.raises(TorchaxServeError, match="closed"):
        model(torch.ones(1, 1))


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("rules", ["int8", "int4"])
@torch.no_grad()
def test_linear_layers_are_quantized(rules, tmp_path):
    torch.manual_seed(0)
    module, x = Mlp(), torch.randn(5, 64)
    with serve(copy.deepcopy(module), quantization=rules) as model:
        found = model(x)
        stored = model._runtime.weights
        assert all(isinstance(stored[name], QuantizedWeight) for name in ("up.weight", "down.weight"))
        numbers = {name: to_torch_tensor(unpacked(weight)) for name, weight in stored.items()}
        exact = torch.func.functional_call(module, numbers, x)  # PyTorch with the numbers that are stored
        assert (found - exact).abs().max() < 0.01 * exact.abs().max()
        model.torch_model.up.weight.mul_(2.0)
        twice = model(x)
        assert isinstance(model._runtime.weights["up.weight"], QuantizedWeight)
        assert (twice - found).abs().max() > 0.1 * found.abs().max()
        folder = model.export(tmp_path / rules, (x,), native=False)
    with serve(folder) as bundle:
        assert np.abs(bundle(x.numpy()) - twice.numpy()).max() < 0.01 * float(twice.abs().max())


@hypothesis.given(
    strategies.lists(strategies.tuples(strategies.integers(1, 5), strategies.integers(1, 40)), min_size=1)
)
def test_a_batch_holds_the_rows_of_its_calls_in_order(sizes):
    signature = inspect.signature(lambda x: None)
    dims = {"x": ("batch", "time")}
    length = max(length for _, length in sizes)
    calls = [
        NamedCall.of(signature.bind(torch.full((rows, length), float(at))), dims) for at, (rows, _) in enumerate(sizes)
    ]
    assert len({call.key() for call in calls}) == 1
    whole = joined([call.padded() for call in calls])
    (x,) = whole.tensors
    total = sum(rows for rows, _ in sizes)
    assert x.shape[0] & (x.shape[0] - 1) == 0 and total <= x.shape[0] < 2 * total
    assert x.shape[1] == bucket_of(length) >= length
    expected = [float(at) for at, (rows, _) in enumerate(sizes) for _ in range(rows)]
    assert x[:total, 0].tolist() == expected and not x[:, length:].any()
