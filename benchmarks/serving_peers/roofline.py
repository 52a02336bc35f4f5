"""The least time that a machine needs for a workload, whoever computes it: the roofline model (Williams et al., 2009).

A step reads all weights and the cached keys and values of its rows, and multiplies each row with the weights; it takes
at least as long as the slower of the two. The rates are the best that this machine has shown in the same run.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving_peers.jobs import Arrival

PRODUCT_SHAPE = (512, 3072, 1024)  # rows, outputs, inputs: few enough that all stay in the caches
ROUNDS = 30
PRODUCT_DTYPES = ("bfloat16", "float32")
FULL, RECURRENT = "full_attention", ("linear_attention", "mamba", "conv", "recurrent")
"""Kinds of layers, as configurations name them."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Rates of a machine, and sizes of a model.

    Attributes:
        bytes_per_s: read from memory.
        flops_of: of products, by dtype: weights of one dtype may be multiplied in another.
        num_multiplied: weights that a token is multiplied with, those of the head not among them.
        num_of_head: weights of the head, which only tokens that are answered need.
        kv_token_bytes: keys and values of a token in all layers.
    """

    bytes_per_s: float
    flops_of: Mapping[str, float]
    num_multiplied: int
    num_of_head: int
    kv_token_bytes: int

    @classmethod
    def measured(cls, shape: Mapping[str, Any], kv_token_bytes: int) -> Roofline | None:
        """With the rates of this machine, now; None but for a dense decoder, whose steps read all weights."""
        if not is_dense(shape):
            return None
        from torchax_serve.profiling.bandwidth import measure_bandwidth

        flops_of = {dtype: products_per_s(dtype) for dtype in PRODUCT_DTYPES}
        return cls(measure_bandwidth().bytes_per_s, flops_of, *num_weights(shape), kv_token_bytes)

    @property
    def flops_per_s(self) -> float:
        """Of products of the fastest dtype: on a processor without instructions for bfloat16 that is float32."""
        return max(self.flops_of.values())

    def better(self, other: Roofline) -> Roofline:
        """With the higher rates of both: a bound is sought, and other programs only slow a measurement down."""
        return dataclasses.replace(
            self,
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
            flops_of={dtype: max(rate, other.flops_of[dtype]) for dtype, rate in self.flops_of.items()},
        )

    def decode_rate(self, num_requests: int, prompt_len: int, new_tokens: int, bits: int = 16) -> float:
        """Tokens/s of requests that run together, behind the first token of each; weights as they are, not packed.

        Weights of fewer than 16 `bits` bound it by what is read alone: products of integers are not measured.
        """
        num_steps = new_tokens - 1
        cached = num_requests * sum(range(prompt_len, prompt_len + num_steps)) * self.kv_token_bytes
        weights = self.num_multiplied + self.num_of_head
        read_s = (num_steps * weights * bits / 8 + cached) / self.bytes_per_s
        products_s = num_steps * num_requests * 2 * weights / self.flops_per_s if bits >= 16 else 0.0
        return num_requests * num_steps / max(read_s, products_s)

    def total_s(self, arrivals: Sequence[Arrival]) -> float:
        """Seconds for requests, whenever they come: their products alone."""
        num_answered = sum(arrival.max_new_tokens for arrival in arrivals)
        num_tokens = sum(len(arrival.prompt_ids) - 1 for arrival in arrivals) + num_answered
        return 2 * (self.num_multiplied * num_tokens + self.num_of_head * num_answered) / self.flops_per_s


def num_weights(shape: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of a dense decoder that a token is multiplied with, those of the head not among them; and the head's."""
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    layer = shape["hidden_size"] * (heads * head_dim + 3 * shape["intermediate_size"])
    return layer * shape["num_hidden_layers"], shape["vocab_size"] * shape["hidden_size"]


def is_dense(shape: Mapping[str, Any]) -> bool:
    """Whether each layer attends to all tokens, and multiplies each with all of its weights."""
    experts = [shape.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    return not any(experts) and "mamba_d_state" not in shape and set(shape.get("layer_types") or [FULL]) <= {FULL}


def kv_token_bytes(shape: Mapping[str, Any]) -> int:
    """Bytes that one token's keys and values take in all layers that keep them, in bfloat16.

    Raises:
        SystemExit: some layer keeps a window of tokens, so that there is no such number.
    """
    kinds = shape.get("layer_types") or [FULL] * shape["num_hidden_layers"]
    if not set(kinds) <= {FULL, "attention", *RECURRENT} or shape.get("sliding_window"):
        sys.exit(
            "expected a shape whose layers attend to everything or keep a state, got sliding windows or others; "
            "choose another"
        )
    heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return sum(kind not in RECURRENT for kind in kinds) * 2 * heads * head_dim * 2


def products_per_s(dtype: str) -> float:
    """Floating-point operations per second of a product in a dtype, the best of PyTorch's and this project's."""
    import jax
    import jax.numpy as jnp
    import torch

    from model_adapters import ops
    from torchax_serve.profiling.bandwidth import fastest_s

    rows, outputs, inputs = PRODUCT_SHAPE
    x, weight = (torch.ones(size, inputs, dtype=getattr(torch, dtype)) for size in (rows, outputs))
    jax_x, jax_weight = (jnp.ones((size, inputs), jnp.dtype(dtype)) for size in (rows, outputs))
    linear = jax.jit(ops.linear)
    ways: tuple[Callable[[], object], ...] = (
        lambda: torch.nn.functional.linear(x, weight),
        lambda: linear(jax_x, jax_weight).block_until_ready(),
    )
    return 2 * rows * outputs * inputs / min(fastest_s(way, ROUNDS) for way in ways)
