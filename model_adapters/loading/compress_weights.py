"""Layout of weights in memory: linear layers and experts packed, the others in large pages."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import torch

from model_adapters.loading.loaded_model import LoadedModel
from model_adapters.loading.memory import give_back_freed
from model_adapters.ops import compressed_weight
from model_adapters.ops.compressed_weight import CompressedWeight, Stored, Weight
from model_adapters.ops.cpu import compress
from model_adapters.ops.cpu.huge_pages import HugePages, in_huge_pages
from model_adapters.program.latent_attention import READ_BY_HEAD

MIN_BYTES = 1 << 17
"""Of a weight. A smaller one stays in the processor's cache anyway."""

MAX_PADDING = 0.05
"""Most of the bytes of all packed weights that padding may add to them, as a share."""

EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
"""Weights of a module that has one of transformers' functions for experts, `program/moe.py` among them."""

INDEX_BYTES = 4
"""Of an entry of an index, int32."""


def prepare_weights(loaded: LoadedModel) -> int:
    """Lays out for a CPU's memory what one device read from files or made up.

    The weights of a caller's object stay as they are.

    Those of linear layers and experts are packed where the processor is made for it, the others lie in large pages of
    memory.

    Returns:
        How many arrays are packed now.
    """
    if loaded.sharding is not None or loaded.source.kind == "object" or jax.default_backend() != "cpu":
        return 0
    num_packed = pack_weights(loaded.module, loaded.weights)
    for array in {id(array): array for array in loaded.weights.values()}.values():  # a tied one has several names
        for part in jax.tree.leaves(array) if not isinstance(array, CompressedWeight) else []:
            in_huge_pages(part)
    give_back_freed()  # what packed weights were before
    return num_packed


def pack_weights(module: torch.nn.Module, weights: dict[str, Weight]) -> int:
    """Packs the weights of linear layers and experts, where the processor is made for it.

    Args:
        module: whose code reads the weights.
        weights: by name, tied names sharing one array; changed in place.

    Returns:
        How many arrays are packed now.
    """
    # Roughly in the order in which layers run, so that weights read one after the other are adjacent in memory.
    multiplied = dict.fromkeys(name for path, child in module.named_modules() for name in _multiplied(path, child))
    # Tables are looked up row by row in the packed weight, which so is the only copy of a tied one.
    tables = {f"{path}.weight" for path, child in module.named_modules() if isinstance(child, torch.nn.Embedding)}
    names_of: dict[int, list[str]] = {}
    for name, array in weights.items():
        names_of.setdefault(id(array), []).append(name)

    def is_packable(array: Weight) -> bool:
        return (
            not isinstance(array, Stored) and array.nbytes >= MIN_BYTES and compress.unsupported_reason(array) is None
        )

    arrays = {id(weights[name]): weights[name] for name in multiplied if name in weights}
    chosen = [names_of[key] for key, array in arrays.items() if is_packable(array)]
    if not chosen:
        return 0
    del arrays  # so that each is freed once it is packed: never are all of them here in both forms
    sizes = [compress.group_bytes(weights[names[0]].shape) for names in chosen]
    memory = HugePages(sum(sizes))

    def pack_one(names: list[str], place: np.ndarray) -> bool:
        layers = [name for name in names if name in multiplied or name in tables]
        array = weights[names[0]]
        assert isinstance(array, jax.Array)
        packed = compressed_weight.compress_weight(array, place, keeps_plain=len(layers) < len(names))
        weights.update(dict.fromkeys(layers, packed) if packed is not None else {})
        return packed is not None

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        num_packed = sum(threads.map(pack_one, chosen, map(memory.take, sizes)))
    equalize_indices(weights)
    return num_packed


def _multiplied(path: str, module: torch.nn.Module) -> list[str]:
    """Returns the names of `module`'s weights [..., out, in] that its products alone read."""
    dot = f"{path}." if path else ""
    if path.endswith(f".{READ_BY_HEAD}"):
        return []
    if isinstance(module, torch.nn.Linear):
        return [f"{dot}weight"] if type(module).forward is torch.nn.Linear.forward else []
    if not hasattr(module, "has_gate") or getattr(module, "is_transposed", True):
        return []
    return [f"{dot}{name}" for name in EXPERTS if isinstance(getattr(module, name, None), torch.nn.Parameter)]


def equalize_indices(weights: dict[str, Weight]) -> None:
    """Pads the indices of packed weights of one shape to one length if that costs little memory.

    An index is as long as its matrix has uncompressed groups. With other lengths in each layer no two layers would be
    of a kind, and each would be traced by itself (`shared_layers`).

    Args:
        weights: by name, tied names sharing one weight; changed in place.
    """
    by_shape: dict[tuple[int, ...], dict[int, CompressedWeight]] = {}
    for weight in weights.values():
        if isinstance(weight, CompressedWeight):
            by_shape.setdefault(weight.shape, {})[id(weight)] = weight
    padded: dict[int, Weight] = {}
    num_bytes = sum(weight.nbytes for same in by_shape.values() for weight in same.values())
    for same in by_shape.values():
        most = int(num_bytes * MAX_PADDING / len(by_shape))
        length = _common_length([weight.index.size for weight in same.values()], most)
        for key, weight in same.items():
            if weight.index.size < length:
                index = np.pad(np.asarray(weight.index), (0, length - weight.index.size))
                padded[key] = dataclasses.replace(weight, index=jax.device_put(index, may_alias=True))
    weights.update({name: padded[id(weight)] for name, weight in weights.items() if id(weight) in padded})


def _common_length(lengths: list[int], num_bytes: int) -> int:
    """Returns the greatest length to which all shorter ones can be padded in `num_bytes`."""
    chosen, total = 0, 0
    for number, length in enumerate(sorted(lengths), 1):
        total += length
        if (number * length - total) * INDEX_BYTES <= num_bytes:
            chosen = length
    return chosen
