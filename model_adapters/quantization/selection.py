"""Which tensors of a module the rules choose."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator

import jax.numpy as jnp
import torch
from transformers.pytorch_utils import Conv1D

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry
from model_adapters.ops.cpu import ffi
from model_adapters.quantization.quantize import scheme_of
from model_adapters.quantization.rules import QuantizationRule, QuantizationRules
from model_adapters.sharding.model_sharding import ModelSharding

MAX_FAULTS = 4
"""Faults of rules that an error lists."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A tensor that rules can choose.

    Attributes:
        path: Path of its module.
        name: Name of the tensor.
        op_name: Qwix's name for what it is used in.
        num_columns: Length of the dimension that a product sums over.
        transposed: The tensor is [in, out].
    """

    path: str
    name: str
    op_name: str
    num_columns: int
    transposed: bool = False


def products_of(module: torch.nn.Module) -> Iterator[Product]:
    """Yields the weights of linear layers, experts and embedding tables of `module`."""
    for path, child in module.named_modules():
        dot = f"{path}." if path else ""
        if isinstance(child, torch.nn.Linear):
            yield Product(path, f"{dot}weight", "dot_general", child.in_features)
        elif isinstance(child, Conv1D):
            yield Product(path, f"{dot}weight", "dot_general", child.weight.shape[0], transposed=True)
        elif isinstance(child, torch.nn.Embedding):
            yield Product(path, f"{dot}weight", "embedding", child.embedding_dim)
        elif hasattr(child, "is_transposed") and hasattr(child, "num_experts"):
            for name, tensor in child._parameters.items():
                if tensor is not None and tensor.ndim == 3:
                    columns = tensor.shape[-2 if child.is_transposed else -1]
                    yield Product(path, f"{dot}{name}", "ragged_dot", columns, transposed=bool(child.is_transposed))


@dataclasses.dataclass(frozen=True)
class Selection:
    """The tensors of a module that are quantized.

    Attributes:
        rules: The rules that chose them.
        chosen: Rule and product by name of the tensor; a tied tensor is under each of its names.
        num_dense: Linear layers and experts that stay dense.
    """

    rules: QuantizationRules
    chosen: dict[str, tuple[QuantizationRule, Product]]
    num_dense: int

    @classmethod
    def of(cls, module: torch.nn.Module, rules: QuantizationRules) -> Selection:
        """Returns what `rules` choose of `module`, which may be on the meta device.

        Raises:
            InvalidArgumentError: rules that match nothing, or groups that do not divide a row; lists all of them.
        """
        products = [each for each in products_of(module) if not rules.for_files or _is_for_files(module, each, rules)]
        chosen: dict[str, tuple[QuantizationRule, Product]] = {}
        for product in products:
            rule = rules.rule_for(product.path, product.op_name)
            if rule is not None and rule.weight_qtype != "none":
                if rules.for_files and rules.is_preset and rule.tile_size and product.num_columns % rule.tile_size:
                    rule = dataclasses.replace(rule, tile_size=None)
                chosen[product.name] = rule, product
        faults = [] if rules.is_preset else [*_unmatched(module, products, rules), *_uneven(chosen)]
        if not chosen and not faults:
            faults = [f"expected linear layers to quantize, got none in {type(module).__name__}; leave it out"]
        if faults:
            more = [f"and {len(faults) - MAX_FAULTS} more like these"] if len(faults) > MAX_FAULTS else []
            raise InvalidArgumentError(f"quantization: {'; '.join(faults[:MAX_FAULTS] + more)}")
        num_dense = sum(each.op_name != "embedding" and each.name not in chosen for each in products)
        return cls(rules, _with_tied_names(module, chosen), num_dense)

    def on_mesh(self, name: str, sharding: ModelSharding | None) -> tuple[QuantizationRule, Product]:
        """Returns rule and product of the tensor `name`.

        Presets have one scale a row where a mesh moves columns.
        """
        rule, product = self.chosen[name]
        is_moved = sharding is not None and sharding.moves_columns(name, transposed=product.transposed)
        return (dataclasses.replace(rule, tile_size=None) if is_moved and self.rules.is_preset else rule), product

    def saved_bytes(self, module: torch.nn.Module) -> int:
        """Returns how many bytes less the weights of `module` take than dense ones."""
        tensors = {id(tensor): (tensor, self.chosen.get(name)) for name, tensor in named_tensors(module).items()}
        saved = 0.0
        for tensor, found in tensors.values():
            if found is not None:
                saved += tensor.numel() * tensor.element_size() - stored_bytes(tensor.numel(), *found)
        return int(saved)


def _is_for_files(module: torch.nn.Module, product: Product, rules: QuantizationRules) -> bool:
    """Tells whether a folder in the format compressed-tensors may hold `product` quantized."""
    if product.op_name != "dot_general" or product.transposed:
        return False
    tensors = named_tensors(module)
    is_tied = any(tensor is tensors[product.name] for name, tensor in tensors.items() if name != product.name)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    is_head = head is not None and module.get_submodule(product.path) is head
    return not is_tied and not (is_head and rules.is_preset)


def stored_bytes(num_elements: int, rule: QuantizationRule, product: Product) -> float:
    """Returns the bytes of a quantized tensor: numbers, and a scale for each group."""
    scheme = scheme_of(rule, product.num_columns, "bfloat16", transposed=product.transposed, source="")
    scale_bytes = jnp.dtype(rule.scale_dtype).itemsize
    if rule.weight_calibration_method.startswith("minmax"):
        scale_bytes += 4
    is_packed = registry.platform() != "cpu" or (ffi.missing() is None and scheme.table is None)
    return num_elements * ((scheme.bits if is_packed else 8) / 8 + scale_bytes / scheme.group)


def _with_tied_names(
    module: torch.nn.Module, chosen: dict[str, tuple[QuantizationRule, Product]]
) -> dict[str, tuple[QuantizationRule, Product]]:
    names_of: dict[int, list[str]] = {}
    for name, tensor in named_tensors(module).items():
        names_of.setdefault(id(tensor), []).append(name)
    tied = {name: names for names in names_of.values() for name in names}
    pairs = getattr(module, "all_tied_weights_keys", None) or {}
    for target, source in pairs.items():  # tied only once the files are read
        names = sorted({*tied.get(target, [target]), *tied.get(source, [source])})
        tied.update(dict.fromkeys(names, names))
    return {other: what for name, what in chosen.items() for other in tied.get(name, [name])}


def _unmatched(module: torch.nn.Module, products: list[Product], rules: QuantizationRules) -> Iterator[str]:
    """Yields what is wrong with rules that choose nothing."""
    paths = [path for path, _ in module.named_modules()]
    for number, rule in enumerate(rules.rules):
        if any(rules.rule_for(each.path, each.op_name) is rule for each in products):
            continue
        where = f"rule {number}: module_path {rule.module_path!r}"
        matched = [path for path in paths if re.fullmatch(rule.module_path, path)]
        usable = [each.path for each in products if each.op_name != "embedding" or "embedding" in rule.op_names]
        if any(rule.applies_to(each.path, each.op_name) for each in products):
            yield f"{where} matches nothing that an earlier rule has not matched; put it in front"
        elif matched:
            yield (
                f"{where} matches only modules that are no linear layers ({', '.join(matched[:2])}); those are "
                f"{', '.join(usable[:2])}, …"
            )
        else:
            near = difflib.get_close_matches(rule.module_path, usable, n=2, cutoff=0.3) or usable[:2]
            yield f"{where} matches no module of {type(module).__name__}; near it are {', '.join(near)}"


def _uneven(chosen: dict[str, tuple[QuantizationRule, Product]]) -> Iterator[str]:
    for rule, product in chosen.values():
        tile, columns = rule.tile_size, product.num_columns
        if isinstance(tile, float) and abs(round(1 / tile) * tile - 1) < 1e-6 and columns % round(1 / tile) == 0:
            continue
        if tile is not None and (isinstance(tile, float) or columns % tile):
            yield (
                f"{product.path}: expected a tile_size that divides its {columns} columns, got {tile}; give another, "
                "or a rule for this module in front"
            )
