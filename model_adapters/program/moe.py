"""Experts of a layer: routed rows on a CPU, a share of the experts on each device of a mesh.

On a CPU :func:`routed_experts` does what transformers' `grouped_mm_experts_forward` does, with each product a
`routed_matmul`, which needs no sorted rows. On other platforms transformers' own function runs.

On a mesh each device computes a share, and one sum adds them. transformers' own function runs on each device, with the
module holding that device's part of its tensors: complete experts, or some hidden units of every expert, or both.
Tokens of experts on other devices get the index after the last expert, which that function treats as "not here", with
weight zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, PartitionSpec
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.once import once
from model_adapters.ops import registry, routed_matmul
from model_adapters.ops.compressed_weight import Weight, stored_form, substituted
from model_adapters.ops.quantized_weight import QuantizedWeight
from model_adapters.ops.routed_matmul import Layout
from model_adapters.ops.spmd import per_shard
from model_adapters.sharding.quantized_sharding import specs_of
from model_adapters.sharding.sharded_trace import mesh_in_trace, placement_in_trace
from sharding_rules import TensorPlacement

IMPLEMENTATION = "torchax_serve_sharded"
ROUTED = "torchax_serve_routed"
GROUPED_MM = "grouped_mm"


def implementation(is_divided: bool) -> str:
    """Returns the name of the experts function to trace.

    `is_divided`: the model is divided among devices.
    """
    if is_divided:
        return IMPLEMENTATION
    return ROUTED if routes() else GROUPED_MM


def routes() -> bool:
    """Returns whether rows are multiplied with their matrices unsorted: on one CPU device."""
    return registry.platform() == "cpu" and mesh_in_trace() is None


def routed_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Computes transformers' experts function without sorting tokens.

    ``[tokens, hidden]`` in and out.
    """

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return routed_product(x.to(weight.dtype), weight, top_k_index, bias, is_transposed=module.is_transposed)

    inner = product(hidden_states, "gate_up_proj" if module.has_gate else "up_proj").flatten(0, 1)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = product(inner.view(*top_k_index.shape, -1), "down_proj")
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return (out * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def routed_product(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, *, is_transposed: bool
) -> torch.Tensor:
    """Returns the op `routed_matmul` of tensors.

    With `is_transposed` the weights are [experts, in, out], as transformers has it.
    """
    added = None if bias is None else jax_view(bias)
    layout: Layout = "ekn" if is_transposed else "enk"
    return torch_view(routed_matmul(jax_view(x), jax_view(weight), jax_view(ids), added, layout=layout))


_REPLICATED = PartitionSpec()


def sharded_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Computes transformers' experts function on a mesh, ``[tokens, hidden]`` in and out.

    Each token has k experts.
    """
    mesh = mesh_in_trace()
    tensors = {name: jax_view(tensor) for name, tensor in module._parameters.items() if tensor is not None}
    placed = {name: placement_in_trace(array) for name, array in tensors.items()}
    divided = {axis for each in placed.values() if each is not None for axis in each.spec if axis is not None}
    if mesh is None or not divided:
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    names = list(tensors)
    parts, specs = zip(*(_divided(array, placed[name], mesh) for name, array in tensors.items()), strict=True)
    num_local = module.num_experts // (mesh.shape["expert"] if "expert" in divided else 1)

    def one_device(states: jax.Array, index: jax.Array, weights: jax.Array, *parts: Weight) -> jax.Array:
        if "expert" in divided:
            index = index - jax.lax.axis_index("expert") * num_local
            is_here = (index >= 0) & (index < num_local)
            index, weights = jnp.where(is_here, index, num_local), jnp.where(is_here, weights, 0)
        with substituted(dict(zip(names, parts, strict=True))) as here:
            if "model" in divided and "down_proj_bias" in here:  # added once, though every device adds its own
                here["down_proj_bias"] = jnp.where(jax.lax.axis_index("model") == 0, here["down_proj_bias"], 0)
            out = _run(module, here, (states, index, weights), num_local, "expert" in divided)
        return jax.lax.psum(out, tuple(sorted(divided)))

    arrays = (*(jax_view(x) for x in (hidden_states, top_k_index, top_k_weights)), *parts)
    return torch_view(per_shard(one_device, arrays, (_REPLICATED, _REPLICATED, _REPLICATED, *specs), _REPLICATED))


def _divided(array: jax.Array, placed: TensorPlacement | None, mesh: Mesh) -> tuple[Weight, Any]:
    """Returns a module's tensor for each device, quantized if stored so, and its division."""
    if placed is None:
        return array, _REPLICATED
    stored = stored_form(array)
    if isinstance(stored, QuantizedWeight) and (specs := specs_of(placed, mesh, stored)) is not None:
        return stored, specs
    return array, placed.spec


def _run(
    module: Any, tensors: dict[str, jax.Array], arrays: tuple[jax.Array, ...], num_experts: int, has_others: bool
) -> jax.Array:
    """Calls transformers' function on a module with `tensors` and `num_experts` experts."""
    before = module.num_experts, module._is_expert_parallel
    stand_ins = {name: torch_view(array) for name, array in tensors.items()}
    try:
        module.num_experts, module._is_expert_parallel = num_experts, has_others
        with torch.nn.utils.stateless._reparametrize_module(module, stand_ins):
            return jax_view(grouped_mm_experts_forward(module, *torch_view(arrays)))
    finally:
        module.num_experts, module._is_expert_parallel = before


@once
def install() -> None:
    """Registers the functions with transformers."""
    ExpertsInterface.register(IMPLEMENTATION, sharded_experts)
    ExpertsInterface.register(ROUTED, routed_experts)


class RowsTimesExperts(Protocol):
    """Multiplies rows with the matrices of their experts."""

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, *, is_transposed: bool = False) -> torch.Tensor:
        """Returns a row for each of `rows`.

        `weight` is [experts, out, in], or [experts, in, out] if `is_transposed`. Rows of experts without a matrix have
        any result.
        """


def route_and_combine(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    experts: Callable[[torch.Tensor, RowsTimesExperts, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns the weighted sum of the outputs of each token's experts: [tokens, hidden].

    Args:
        hidden: [tokens, hidden].
        expert_ids: int[tokens, k]; `num_experts` and above have no matrices.
        weights: [tokens, k].
        num_experts: Experts that have matrices, the first ones of a stack.
        experts: Called with rows [tokens * k, hidden], the product of such rows and a stack of matrices, and the rows'
            experts int[tokens * k]; returns as many rows.
    """
    num_tokens, num_chosen = expert_ids.shape
    flat = expert_ids.reshape(-1)
    if routes():
        there = torch.where(expert_ids < num_experts, expert_ids, -1)

        def routed(rows: torch.Tensor, weight: torch.Tensor, *, is_transposed: bool = False) -> torch.Tensor:
            by_choice = rows.reshape(num_tokens, num_chosen, -1)
            return routed_product(by_choice, weight, there, None, is_transposed=is_transposed).flatten(0, 1)

        out = experts(hidden.repeat_interleave(num_chosen, dim=0), routed, flat)
        return (out * weights.reshape(-1)[:, None]).reshape(num_tokens, num_chosen, -1).sum(1)
    order, ends = torch.argsort(flat, stable=True), group_ends(flat, num_experts)

    def of_groups(rows: torch.Tensor, weight: torch.Tensor, *, is_transposed: bool = False) -> torch.Tensor:
        matrices = weight if weight.shape[0] == num_experts else weight[:num_experts]
        return torch._grouped_mm(rows, matrices if is_transposed else matrices.transpose(1, 2), offs=ends)

    out = experts(hidden[order // num_chosen], of_groups, flat[order])
    out = out * weights.reshape(-1)[order][:, None]
    back = torch.argsort(order)
    return out[back].reshape(num_tokens, num_chosen, -1).sum(1)


def group_ends(expert_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Returns int32[num_experts], the end of each expert's rows after sorting by expert."""
    counted = expert_ids.reshape(-1)[None] <= torch.arange(num_experts, device=expert_ids.device)[:, None]
    return counted.sum(1).to(torch.int32)


def sum_of_modules(
    experts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Returns the weighted sum of outputs of experts that are separate modules.

    The result is [tokens, hidden]. An expert that some token chose computes all tokens; one that none chose is skipped
    on the device.

    Args:
        experts: ``expert_0``, ``expert_1``, … from [tokens, hidden] to as much.
        hidden: [tokens, hidden].
        chosen: bool[tokens, experts].
        weights: [tokens, experts]; zero where an expert is not chosen.
    """

    def zeros(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.zeros_like(x)

    total = torch.zeros_like(hidden)
    for index in range(chosen.shape[1]):
        expert = experts[f"expert_{index}"]

        def computed(x: jax.Array, scale: jax.Array, expert: Any = expert) -> jax.Array:
            return jax_view((expert(torch_view(x)) * torch_view(scale)).to(hidden.dtype))

        arrays = jax_view(hidden), jax_view(weights[:, index, None])
        total = total + torch_view(jax.lax.cond(jax_view(chosen[:, index].any()), computed, zeros, *arrays))
    return total
