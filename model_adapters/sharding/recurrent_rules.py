"""Rules of recurrent layers, from the numbers that their modules hold.

One weight of such a layer often computes several things side by side: queries, keys and values of a delta rule; gate,
inputs, B, C and time steps of Mamba-2. Each device gets its heads of each of them, so that the layer needs one sum,
that of its last product. A layer is recognised by the attributes that its code computes with; what fits no kind, or has
heads that the devices do not divide, is laid out as any other layer is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from sharding_rules import Rule
from sharding_rules.layout import Parts

SOURCE = "recurrent layer"


@dataclass(frozen=True)
class _Layer:
    """What the parts of a layer compute, by the name of a child.

    Attributes:
        outputs: Of products, what they make.
        inputs: Of products, what they take.
        channels: Of convolutions whose weights every device has, their channels.
        tensors: Of parameters and of convolutions, whose first dimension is divided, what that is.
        replicated: Products that every device computes all of.
    """

    outputs: Mapping[str, Parts]
    inputs: Mapping[str, Parts]
    channels: Mapping[str, Parts] = field(default_factory=dict)
    tensors: Mapping[str, Parts] = field(default_factory=dict)
    replicated: tuple[str, ...] = ()


@dataclass(frozen=True)
class _TensorRule:
    """The rule of one tensor of a layer, named below it."""

    name: str
    axes: tuple[str | None, ...]
    parts: Parts | None

    def of_rank(self, rank: int) -> _TensorRule:
        """Returns the same for a parameter with more dimensions."""
        return dataclasses.replace(self, axes=(*self.axes, *(None,) * (rank - len(self.axes))))

    def fits(self, shape: tuple[int, ...], num_shards: int) -> bool:
        """Returns whether a tensor is made of the parts, and the devices divide their heads."""
        if len(shape) != len(self.axes):
            return False
        if self.parts is None:
            return True
        dim = self.axes.index("parts") if "parts" in self.axes else 0
        return shape[dim] == sum(self.parts.sizes) and not any(heads % num_shards for heads in self.parts.heads)


def _one(size: int, heads: int) -> Parts:
    return Parts((size,), (heads,))


def _numbers(layer: torch.nn.Module, names: str) -> list[int] | None:
    """Returns attributes of a module that are all integers; None if one is not."""
    found = [getattr(layer, name, None) for name in names.split()]
    return [each for each in found if isinstance(each, int)] if all(isinstance(n, int) for n in found) else None


def _gated_delta(layer: torch.nn.Module, num_shards: int) -> _Layer | None:
    """Recognises the gated delta rule of Qwen3-Next, Qwen3.5 and OLMo hybrid."""
    numbers = _numbers(layer, "key_dim value_dim num_k_heads num_v_heads conv_dim")
    if numbers is None or numbers[4] != 2 * numbers[0] + numbers[1]:
        return None
    key_dim, value_dim, key_heads, value_heads, _ = numbers
    key, value = _one(key_dim, key_heads), _one(value_dim, value_heads)
    qkv = Parts((key_dim, key_dim, value_dim), (key_heads, key_heads, value_heads))
    steps = _one(value_heads, value_heads)
    outputs = {"in_proj_qkv": qkv, "q_proj": key, "k_proj": key}
    outputs |= dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), value)
    outputs |= dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj"), steps)
    # Everything of a head of keys side by side.
    outputs["in_proj_qkvz"] = _one(2 * (key_dim + value_dim), key_heads)
    outputs["in_proj_ba"] = _one(2 * value_heads, key_heads)
    return _Layer(outputs, dict.fromkeys(("out_proj", "o_proj"), value), {"conv1d": qkv})


def _kimi_delta(layer: torch.nn.Module, num_shards: int) -> _Layer | None:
    """Recognises Kimi's delta attention."""
    numbers = _numbers(layer, "qkv_dim num_heads conv_dim")
    if numbers is None or numbers[2] != 3 * numbers[0]:
        return None
    dim, heads, _ = numbers
    by_head = _one(dim, heads)
    outputs = dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_b_proj", "forget_gate.f_b_proj"), by_head)
    outputs["b_proj"] = _one(heads, heads)
    channels = {"conv1d": Parts((dim,) * 3, (heads,) * 3)}
    return _Layer(outputs, {"o_proj": by_head}, channels, replicated=("g_a_proj", "forget_gate.f_a_proj"))


def _state_space(layer: torch.nn.Module, num_shards: int) -> _Layer | None:
    """Recognises Mamba-2: gate, inputs, B, C and time steps.

    A group of B and C is for several heads.
    """
    numbers = _numbers(layer, "intermediate_size conv_dim n_groups ssm_state_size num_heads")
    if numbers is None or numbers[1] != numbers[0] + 2 * numbers[2] * numbers[3]:
        return None
    size, _, groups, state_size, heads = numbers
    group_heads = 0 if groups % num_shards else groups
    sizes, counts = (size, *(groups * state_size,) * 2), (heads, group_heads, group_heads)
    projected = Parts((size, *sizes, heads), (heads, *counts, heads))
    return _Layer({"in_proj": projected}, {"out_proj": _one(size, heads)}, {"conv1d": Parts(sizes, counts)})


def _selective_scan(layer: torch.nn.Module, num_shards: int) -> _Layer | None:
    """Recognises Mamba, in which each channel runs by itself: inputs and gate."""
    numbers = _numbers(layer, "intermediate_size time_step_rank ssm_state_size")
    if numbers is None or tuple(getattr(layer, "A_log", torch.empty(0)).shape) != (numbers[0], numbers[2]):
        return None
    channels = _one(numbers[0], numbers[0])
    outputs = {"in_proj": Parts((numbers[0],) * 2, (numbers[0],) * 2), "dt_proj": channels}
    tensors = dict.fromkeys(("conv1d", "A_log", "D"), channels)
    return _Layer(outputs, {"x_proj": channels, "out_proj": channels}, tensors=tensors)


def _short_convolution(layer: torch.nn.Module, num_shards: int) -> _Layer | None:
    """Recognises LFM2's convolution between two gates."""
    convolution, product = getattr(layer, "conv", None), getattr(layer, "in_proj", None)
    if not isinstance(convolution, torch.nn.Conv1d) or not isinstance(product, torch.nn.Linear):
        return None
    size = convolution.in_channels
    if convolution.groups != size or product.out_features != 3 * size:
        return None
    channels = _one(size, size)
    return _Layer({"in_proj": Parts((size,) * 3, (size,) * 3)}, {"out_proj": channels}, tensors={"conv": channels})


def _gated_mlp(layer: torch.nn.Module, num_shards: int) -> _Layer | None:
    """Recognises an MLP whose gate and up are one product (Granite, Zamba 2)."""
    for name, last_name in (("input_linear", "output_linear"), ("gate_up_proj", "down_proj")):
        product, last = getattr(layer, name, None), getattr(layer, last_name, None)
        if isinstance(product, torch.nn.Linear) and isinstance(last, torch.nn.Linear):
            size = last.in_features
            parts = Parts((size,) * 2, (size,) * 2)
            outputs, replicated = _low_rank(layer, {f"{name}_adapter_list": parts})
            return _Layer({name: parts, **outputs}, {last_name: _one(size, size)}, replicated=replicated)
    return None


def _adapted_attention(layer: torch.nn.Module, num_shards: int) -> _Layer | None:
    """Recognises attention that several layers share, each with its adapters (Zamba 2)."""
    numbers = _numbers(layer, "head_dim num_key_value_groups")
    output = getattr(layer, "o_proj", None)
    if numbers is None or not hasattr(layer, "linear_q_adapter_list") or not isinstance(output, torch.nn.Linear):
        return None
    head_dim, group = numbers
    heads = output.in_features // head_dim
    queries, keys = _one(heads * head_dim, heads), _one(heads // group * head_dim, heads // group)
    by_part = {"q": queries, "k": keys, "v": keys}
    adapters, replicated = _low_rank(layer, {f"linear_{name}_adapter_list": parts for name, parts in by_part.items()})
    outputs = {f"{name}_proj": parts for name, parts in by_part.items()}
    return _Layer({**outputs, **adapters}, {"o_proj": queries}, replicated=replicated)


def _shared_block(layer: torch.nn.Module, num_shards: int) -> _Layer | None:
    """Recognises the product behind a block that several layers share (Zamba).

    Divided by what it makes, it would divide the hidden state of all layers by columns.
    """
    product = getattr(layer, "linear", None)
    if not hasattr(layer, "mamba_decoder") or not isinstance(product, torch.nn.Linear):
        return None
    return _Layer({}, {"linear": _one(product.in_features, product.in_features)})


def _low_rank(layer: torch.nn.Module, lists: Mapping[str, Parts]) -> tuple[dict[str, Parts], tuple[str, ...]]:
    """Returns what adapters beside products make, and their first products.

    Those every device computes.

    Args:
        layer: The layer.
        lists: By name of a list of adapters, what they make.
    """
    pairs = [(name, child) for name in lists for child, _ in getattr(layer, name, torch.nn.Module()).named_children()]
    outputs = {f"{name}.{child}.1": lists[name] for name, child in pairs}
    return outputs, tuple(f"{name}.{child}.0" for name, child in pairs)


def _latent_attention(layer: torch.nn.Module, num_shards: int) -> _Layer | None:
    """Recognises attention on latents, which every device has (Kimi)."""
    numbers = _numbers(layer, "num_heads qk_head_dim qk_nope_head_dim v_head_dim kv_lora_rank")
    if numbers is None:
        return None
    heads, dim, nope_dim, value_dim, _ = numbers
    outputs = dict.fromkeys(("q_proj", "q_b_proj"), _one(heads * dim, heads))
    outputs["kv_b_proj"] = _one(heads * (nope_dim + value_dim), heads)
    replicated = ("kv_a_proj_with_mqa", "q_a_proj")
    return _Layer(outputs, {"o_proj": _one(heads * value_dim, heads)}, replicated=replicated)


KINDS: tuple[Callable[[torch.nn.Module, int], _Layer | None], ...] = (
    _gated_delta,
    _kimi_delta,
    _state_space,
    _selective_scan,
    _short_convolution,
)
BESIDE = (_gated_mlp, _adapted_attention, _shared_block, _latent_attention)
"""Kinds that are divided so in models that have recurrent layers, where no plan of the model's names them."""


def recurrent_rules(module: torch.nn.Module, num_shards: int) -> list[Rule]:
    """Returns rules for recurrent layers whose heads `num_shards` devices divide."""
    layers: dict[_TensorRule, list[str]] = {}
    for kinds in (KINDS, BESIDE):
        for name, layer in module.named_modules():
            found = next((kind for each in kinds if (kind := each(layer, num_shards)) is not None), None)
            for rule in () if found is None else _rules_of(layer, found, num_shards):
                layers.setdefault(rule, []).append(re.escape(name))
        if not layers:
            return []
    return [
        Rule(rf"({'|'.join(names)})\.{re.escape(rule.name)}", rule.axes, True, SOURCE, rule.parts)
        for rule, names in layers.items()
    ]


def _rules_of(layer: torch.nn.Module, kind: _Layer, num_shards: int) -> list[_TensorRule]:
    """Returns the rules of one layer; none if its tensors do not fit or do not divide."""
    wanted = [_TensorRule(f"{child}.weight", ("parts", "embed"), parts) for child, parts in kind.outputs.items()]
    wanted += [_TensorRule(f"{child}.bias", ("parts",), parts) for child, parts in kind.outputs.items()]
    wanted += [_TensorRule(f"{child}.weight", ("embed", "parts"), parts) for child, parts in kind.inputs.items()]
    wanted += [_TensorRule(f"{child}.bias", ("embed",), None) for child in kind.inputs]
    wanted += [_TensorRule(f"{child}.weight", (None, None), None) for child in kind.replicated]
    wanted += [_TensorRule(f"{child}.weight", (None, None, None), parts) for child, parts in kind.channels.items()]
    wanted += [_TensorRule(f"{child}.bias", (None,), parts) for child, parts in kind.channels.items()]
    for child, parts in kind.tensors.items():
        wanted += [_TensorRule(f"{child}.weight", ("parts", None, None), parts)]
        wanted += [_TensorRule(f"{child}.bias", ("parts",), parts), _TensorRule(child, ("parts",), parts)]
    shapes = {name: tuple(tensor.shape) for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    rules = [rule.of_rank(len(shapes[rule.name])) for rule in wanted if rule.name in shapes]
    return rules if all(rule.fits(shapes[rule.name], num_shards) for rule in rules) else []
