"""Layers of one kind whose arguments and results have strides or share memory. Results are those of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_stacks import WIDTH, Layer, Stack, compared


class Rearranged(Layer):
    """Writes into what reshape gives of its argument: a view or a copy, by the strides."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        flat = x.reshape(-1)
        flat.add_(1)
        return x + self.shift[0]


class StackOfStrided(Stack):
    """Gives layers a transposed argument, every second column, and the contiguous result of the last layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned, columns = (x * 1).transpose(0, 1), (x * 2)[:, ::2]
        first, second = self.layers[0](turned), self.layers[1](columns)
        third = self.layers[3](self.layers[2](first.contiguous()))
        return (turned + first + third).T + torch.cat([second, columns], 1)


def test_arguments_keep_their_strides() -> None:
    calls = compared(StackOfStrided(Rearranged))
    assert len(calls) == 4


class Turned(Layer):
    """Returns its result transposed."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return (super().forward(x) * 1).transpose(0, 1)


class StackOfTurned(Stack):
    """Writes into what contiguous gives of each layer's result, which is a copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            out = layer(x)
            copied = out.contiguous()
            copied.add_(1)
            x = (out + copied).transpose(0, 1)
        return x


def test_results_keep_their_strides() -> None:
    calls = compared(StackOfTurned(Turned))
    assert len(calls) == 4


class AddsResidual(Layer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        x.add_(self.shift)
        return x + kwargs["residual"]


class StackOfResiduals(Stack):
    """Passes a tensor of its own first, and then a view of the argument that the layer writes into."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, residual = x * 1, x * 2
        for layer in self.layers:
            x = layer(x, residual=residual)
            residual = x[:]
        return x


def test_an_argument_that_is_a_view_of_a_written_one() -> None:
    assert len(compared(StackOfResiduals(AddsResidual))) == 1


class WritesTable(Layer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        kwargs["table"].add_(1)
        return super().forward(x) + kwargs["table"]


class StackWithTable(Stack):
    """Passes a tensor that is compared by identity: of the host, or annotated. There is a view of it."""

    on_host = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(WIDTH) if self.on_host else x[0] * 0
        table.note = "a table"  # type: ignore[attr-defined]
        part = table[1:]
        for layer in self.layers:
            x = layer(x, table=table)
        return x * table + part.sum()


@pytest.mark.parametrize("on_host", [True, False])
def test_a_layer_that_writes_into_an_object_writes_once(on_host: bool) -> None:
    module = StackWithTable(WritesTable)
    module.on_host = on_host
    assert compared(module) == []
