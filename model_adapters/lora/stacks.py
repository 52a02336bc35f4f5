"""Matrices of several LoRA adapters in a model's weights, for requests of one step.

Their number and rank are fixed: another adapter is another value of arrays, and compiles nothing. Ranks are filled up
with zeros, which is exact. On a mesh B is divided as the rows of the weight, A as its columns.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Sharding
from transformers.pytorch_utils import Conv1D

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.lora.adapter_files import AdapterFiles
from model_adapters.ops.compressed_weight import Weight, Weights
from model_adapters.ops.lora_weight import LoraWeight
from model_adapters.program.media import language_model_name, takes_media
from model_adapters.sharding.model_sharding import ModelSharding
from sharding_rules.layout import DimLayout

Stack = tuple[jax.Array, jax.Array]
"""Matrices A ``[adapters, rank, in]`` and B ``[adapters, rank, out]`` of a weight."""


@dataclasses.dataclass(frozen=True)
class LinearLayer:
    """A layer that may have adapters.

    Attributes:
        weight: Name of its weight.
        num_in, num_out: Sizes, without the padding of a mesh.
        is_turned: Whether its weight is ``[in, out]``, as that of a `Conv1D`.
    """

    weight: str
    num_in: int
    num_out: int
    is_turned: bool


def linear_layers(module: Any, weights: Weights) -> dict[str, LinearLayer | str]:
    """Returns linear layers by name: the layer, or why it cannot have adapters of requests."""
    owners: dict[int, list[str]] = {}
    for name, held in weights.items():
        owners.setdefault(id(held), []).append(name)
    head, decoder = module.get_output_embeddings(), module.get_decoder()
    inside = {id(part) for part in (module if decoder is None else decoder).modules()}
    # Encoders run once for requests with any adapter, or none.
    if takes_media(module) and (language_model := language_model_name(module)) is not None:
        inside &= {id(part) for part in module.get_submodule(language_model).modules()}
    found: dict[str, LinearLayer | str] = {}
    for name, part in module.named_modules():
        weight, is_turned = f"{name}.weight", isinstance(part, Conv1D)
        plain = torch.nn.Linear.forward if isinstance(part, torch.nn.Linear) else Conv1D.forward
        if not isinstance(part, torch.nn.Linear | Conv1D) or weight not in weights:
            continue
        sizes = [int(size) for size in part.weight.shape]
        if part is head or id(part) not in inside:
            found[name] = "the head" if part is head else "a layer outside of the decoder"
        elif type(part).forward is not plain:
            found[name] = f"a {type(part).__name__}, whose code is more than a product"
        elif "experts" in name.split("."):
            found[name] = "a layer of an expert, whose tokens are in another order"
        elif len(others := owners[id(weights[weight])]) > 1:
            found[name] = f"the same weight as {next(other for other in others if other != weight)}"
        else:
            num_in, num_out = sizes if is_turned else sizes[::-1]
            found[name] = LinearLayer(weight, num_in, num_out, is_turned)
    return found


class LoraStacks:
    """The matrices of all adapters of a model on its devices.

    Args:
        module: The model.
        weights: Its weights by name.
        sharding: Their layout on a mesh; None: on one device.
        targets: Last parts of the names of the layers that have adapters, such as "q_proj"; empty: all that can.
        max_loras: Maximum number of adapters.
        max_rank: Maximum rank.

    Attributes:
        form: What programs depend on: number, rank and layers.

    Raises:
        InvalidArgumentError: no layer has the name of a target.
    """

    def __init__(
        self,
        module: Any,
        weights: Weights,
        sharding: ModelSharding | None,
        targets: Sequence[str],
        max_loras: int,
        max_rank: int,
    ) -> None:
        self._known = linear_layers(module, weights)
        self._sharding, self._targets, self._max_rank = sharding, tuple(targets), max_rank
        chosen = {
            name: layer
            for name, layer in self._known.items()
            if isinstance(layer, LinearLayer) and (not targets or name.rpartition(".")[2] in targets)
        }
        ends = {name.rpartition(".")[2] for name in chosen}
        if missing := [target for target in targets if target not in ends]:
            able = (name for name, layer in self._known.items() if isinstance(layer, LinearLayer))
            possible = sorted({name.rpartition(".")[2] for name in able})
            raise InvalidArgumentError(
                f"lora_target_modules: expected names of linear layers ({', '.join(possible)}), got {missing[0]!r}"
            )
        self._layers = chosen
        self._dtypes = {name: weights[layer.weight].dtype for name, layer in chosen.items()}
        described = f"{max_loras} {max_rank} {sorted(chosen)}"
        self.form = f"{max_loras} x {max_rank} {hashlib.sha256(described.encode()).hexdigest()[:16]}"
        self._stacks = {name: self._zeros(name, max_loras) for name in chosen}
        self._live: dict[str, Weight] = {}

    @property
    def nbytes(self) -> int:
        """Number of bytes of all matrices."""
        return sum(int(part.nbytes) for stack in self._stacks.values() for part in stack)

    def _zeros(self, name: str, number: int) -> Stack:
        layer = self._layers[name]
        plain = _plain(number), _plain(self._max_rank)
        return self._placed(
            name, [np.zeros((number, self._max_rank, size)) for size in (layer.num_in, layer.num_out)], plain
        )

    def _placed(self, name: str, arrays: Sequence[np.ndarray], lead: Sequence[DimLayout]) -> Stack:
        """Returns arrays ``[..., in]`` and ``[..., out]`` on the devices."""
        dtype = self._dtypes[name]
        a, b = (array.astype(dtype) for array in arrays)
        if self._sharding is None:
            return jax.device_put(a), jax.device_put(b)
        dims = self._sharding.placed[self._layers[name].weight].dims
        inner, outer = dims if self._layers[name].is_turned else dims[::-1]
        return self._sharding.divided(a, (*lead, inner)), self._sharding.divided(b, (*lead, outer))

    def weights(self, base: Weights) -> dict[str, Weight]:
        """Returns `base` with the adapters for an engine's steps; later ones are added in place."""
        self.follow(base)
        return self._live

    def follow(self, base: Weights) -> None:
        """Takes over other values of the weights without adapters."""
        new = dict(base)
        for name, layer in self._layers.items():
            new[layer.weight] = LoraWeight(base[layer.weight], *self._stacks[name])
        self._live.update(new)
        for name in self._live.keys() - new.keys():
            del self._live[name]

    def close(self) -> None:
        """Frees the matrices."""
        self._live.clear()
        self._stacks.clear()

    def loaded(self, adapter: AdapterFiles, index: int) -> Callable[[], None]:
        """Reads an adapter to the device; returns the function that puts it into the weights.

        Args:
            adapter: The adapter.
            index: Its place.

        Raises:
            InvalidArgumentError: an adapter of another model, of a larger rank, or of layers that have none.
            UnsupportedModelError: an adapter of layers that can have none.
        """
        self.check(adapter)
        new = {}
        for name, stack in self._stacks.items():
            parts = self._padded(name, adapter)
            rows = self._placed(name, parts, (_plain(self._max_rank),))
            new[name] = tuple(
                _writer(old.sharding)(old, part, np.int32(index)) for old, part in zip(stack, rows, strict=True)
            )
        jax.block_until_ready(new)

        def put() -> None:
            self._stacks.update(new)
            for name, (a, b) in new.items():
                weight = self._layers[name].weight
                if weight in self._live:
                    held: Any = self._live[weight]
                    self._live[weight] = LoraWeight(held.base, a, b)

        return put

    def _padded(self, name: str, adapter: AdapterFiles) -> tuple[np.ndarray, np.ndarray]:
        """Returns A [rank, in] and B [rank, out] of a layer, with zeros to the maximum rank."""
        layer = self._layers[name]
        padded = [np.zeros((self._max_rank, size), np.float32) for size in (layer.num_in, layer.num_out)]
        if name in adapter.factors:
            a, b = adapter.matrices(name)
            padded[0][: len(a)], padded[1][: len(a)] = a, b.T
        return padded[0], padded[1]

    def check(self, adapter: AdapterFiles) -> None:
        """Raises the errors of `loaded`."""
        for name, parts in sorted(adapter.factors.items()):
            layer = self._known.get(name)
            if layer is None:
                raise InvalidArgumentError(
                    f"adapter: expected an adapter of this model, got one with {name}, which is no linear layer of it; "
                    f"it was made for {adapter.base}"
                )
            if isinstance(layer, str):
                raise UnsupportedModelError(
                    f"adapter: {name} is {layer}, which requests of a batch share; merge the adapter: "
                    "serve(model, adapter=...)"
                )
            shapes = parts["A"].shape[1], parts["B"].shape[0]
            if shapes != (layer.num_in, layer.num_out):
                raise InvalidArgumentError(
                    f"adapter: {name}: expected matrices of {layer.num_in} inputs and {layer.num_out} outputs, got "
                    f"{shapes[0]} and {shapes[1]}; it was made for {adapter.base}"
                )
            if (rank := parts["A"].shape[0]) > self._max_rank:
                raise InvalidArgumentError(
                    f"adapter: {name}: expected a rank of at most {self._max_rank} (max_lora_rank), got {rank}; serve "
                    f"the model with max_lora_rank={rank}"
                )
            if name not in self._layers:
                raise InvalidArgumentError(
                    f"adapter: {name}: expected layers {', '.join(self._targets)} (lora_target_modules), got another; "
                    "serve the model with it in the list"
                )


def targets_of(adapters: Sequence[AdapterFiles]) -> tuple[str, ...]:
    """Returns the last parts of the names of all layers of `adapters`."""
    return tuple(sorted({name.rpartition(".")[2] for adapter in adapters for name in adapter.factors}))


def _plain(size: int) -> DimLayout:
    return DimLayout(size, size, None, None)


@functools.cache
def _writer(sharding: Sharding) -> Any:
    """Returns the compiled function that puts a matrix into a stack."""

    def write(stack: jax.Array, new: jax.Array, index: Any) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, new, index, 0)

    return jax.jit(write, out_shardings=sharding)
