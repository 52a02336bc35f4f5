"""Layers of one kind share one traced function; everything else is traced by itself. Results are those of PyTorch."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import jax
import numpy as np
import pytest
import torch
from layer_stacks import WIDTH, Layer, Stack, compared
from transformers import LlamaConfig, LlamaForCausalLM

from model_adapters.bridge.extract import extract_jax
from torchax_serve import to_jax


def test_layers_of_one_kind_call_one_program() -> None:
    calls = compared(Stack(Layer))
    assert len(calls) == 4
    assert len({id(program) for program in calls}) == 1


def test_a_lowered_program_has_one_function_for_all_layers() -> None:
    sizes = []
    for number in (2, 8):
        weights, function = extract_jax(Stack(Layer, number))
        text = jax.jit(function).lower(weights, (np.ones((3, WIDTH), np.float32),)).as_text()
        sizes.append((text.count("func.func private @shared_"), text.count("stablehlo.tanh")))
    assert sizes == [(1, 1), (1, 1)]


class Processor:
    """What computes in the place of its layer, as attention processors of diffusers do."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor, self.count = factor, 0

    def __call__(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return Layer.forward(layer, self.factor * x)


class Processed(Layer):
    """A layer with a processor."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.processor = Processor()

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return self.processor(self, x)


class Counting(Processor):
    """A processor that counts its calls, and adds their number."""

    def __call__(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().__call__(layer, x) + self.count


def test_processors_with_equal_attributes_are_of_one_kind() -> None:
    module = Stack(Processed)
    assert len(compared(module)) == 4
    module.layers[1].processor.factor = 0.5
    calls = compared(module)
    assert len(calls) == 4
    assert len({id(program) for program in calls}) == 2


def test_a_processor_that_changes_is_called_for_each_layer() -> None:
    module = Stack(Processed)
    for layer in module.layers:
        layer.processor = Counting()
    assert compared(module) == []
    assert [layer.processor.count for layer in module.layers] == [1] * 4, "a trial has left its count"


class StackWithGap(Stack):
    """Layers, and a place without one."""

    def __init__(self, kind: type[Layer]) -> None:
        super().__init__(kind)
        self.layers.append(None)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x if layer is None else layer(x)
        return x


def test_lists_with_gaps() -> None:
    assert len(compared(StackWithGap(Layer))) == 4


class Halves(Layer):
    """A layer that returns two slices of what it computes; `gap` is the distance between them."""

    gap = 0

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        both = torch.cat([super().forward(x), x])
        end = x.shape[0]
        return both[:end], both[end + self.gap :]


class Overlapping(Halves):
    """The same with an element in both slices."""

    gap = -1


class StackOfHalves(Stack):
    """Layers of which the next gets the first result, written to afterwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, rest = layer(x)
            rest[:1] += 1
        return x + rest[-1]


@pytest.mark.parametrize(("kind", "number"), [(Halves, 4), (Overlapping, 0)])
def test_slices_of_one_array_are_results_if_they_are_apart(kind: type[Layer], number: int) -> None:
    assert len(compared(StackOfHalves(kind))) == number


def test_gradients_are_those_of_pytorch() -> None:
    module = Stack(Layer).eval()
    x = torch.linspace(-1, 1, WIDTH).reshape(1, WIDTH)
    weights, function = extract_jax(module)
    found = jax.jit(jax.grad(lambda w: function(w, (x.numpy(),)).sum()))(weights)
    module(x).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(np.asarray(found[name]), parameter.grad.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


class ReadsIndex(Layer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(x) * (2.0 if self.index % 2 else 0.5)


class ReadsTable(Layer):
    TABLE = (1.0, 0.5, 2.0, -1.0)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(x) * self.TABLE[self.index]


class WritesAttribute(Layer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        self.number_of_calls = getattr(self, "number_of_calls", 0) + 1
        return super().forward(x) * self.number_of_calls


class WritesList(Layer):
    """Has a list that is one for all layers of a stack, as copies have."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.seen = [index] if index == 0 else []

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        self.seen.append(1)
        return super().forward(x) * len(self.seen)


class SharedLists(Stack):
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__(kind)
        for layer in self.layers:
            layer.seen = self.layers[0].seen


@pytest.mark.parametrize("kind", [ReadsIndex, ReadsTable, WritesAttribute])
def test_a_layer_that_does_more_is_traced_by_itself(kind: type[Layer]) -> None:
    assert compared(Stack(kind)) == []


def test_a_layer_that_writes_into_a_shared_list_is_traced_by_itself() -> None:
    assert compared(SharedLists(WritesList)) == []


class WritesArgument(Layer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        x += self.shift
        return torch.tanh(self.first(x))


class StackWithResidual(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for layer in self.layers:
            x = layer(x) + x  # reads what the layer has written
        return x


def test_writes_into_an_argument_are_seen_outside() -> None:
    assert len(compared(StackWithResidual(WritesArgument))) == 4


class OtherAttribute(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = 2.0 if index == 2 else 0.5

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(x) * self.scale


def test_layers_with_other_attributes_are_of_another_kind() -> None:
    calls = compared(Stack(OtherAttribute))
    assert [id(each) == id(calls[0]) for each in calls] == [True, True, False, True]


class WithExperts(Layer):
    """A layer with a list of parts of one kind."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.experts = torch.nn.ModuleList([Layer(number) for number in range(3)])

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return sum(expert(x) for expert in self.experts) + super().forward(x)


def test_lists_within_layers() -> None:
    calls = compared(Stack(WithExperts))
    assert len(calls) == 4
    assert len({id(program) for program in calls}) == 1


class TwoArguments(Stack):
    """Passes a dict that layers fill."""

    KIND: type[dict[str, torch.Tensor]] = dict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stored = self.KIND()
        for layer in self.layers:
            x = layer(x, stored=stored)
        return x + stored["sum"]


class FillsDict(Layer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        stored = kwargs["stored"]
        stored["sum"] = stored.get("sum", 0) + x
        return super().forward(x)


class OwnDict(dict[str, torch.Tensor]):
    """A dict of a class of its own."""


class UserDictOfOwn(UserDict[str, torch.Tensor]):
    """What Gemma 4 passes."""


@pytest.mark.parametrize("kind", [dict, OwnDict, UserDictOfOwn])
def test_a_dict_that_layers_fill(kind: type[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoArguments, "KIND", kind)
    assert compared(TwoArguments(FillsDict)) == []


class FillsAtTheEnd(Layer):
    """Uses the dict in its last layer alone, as few layers of Gemma 4 do."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.is_last = index == 3

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        if self.is_last:
            kwargs["stored"]["sum"] = x
        return super().forward(x)


def test_layers_that_do_not_use_a_dict_share_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoArguments, "KIND", UserDictOfOwn)
    calls = compared(TwoArguments(FillsAtTheEnd))
    assert len(calls) == 3
    assert len({id(program) for program in calls}) == 1


def test_a_model_returns_hidden_states_and_attentions_of_each_layer() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=4, attn_implementation="eager", **sizes))
    ids = torch.tensor([[1, 5, 7, 2]])
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected = model.eval()(ids, **wanted)
    found = to_jax(model)(ids, **wanted)
    for name in ("hidden_states", "attentions"):
        assert len(found[name]) == len(expected[name])
        for ours, theirs in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
