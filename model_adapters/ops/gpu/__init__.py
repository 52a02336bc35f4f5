"""Pallas kernels for GPUs. Importing the package registers them with their ops."""

import importlib.util

__all__ = []

# JAX has announced an end of this lowering; a release without it leaves the kernels out, and the references run.
if importlib.util.find_spec("jax.experimental.pallas.triton") is not None:
    from model_adapters.ops.gpu import (
        decode_attention_triton,
        gated_delta_rule,
        grouped_matmul,
        ragged_paged_attention,
        state_space,
    )

    __all__ += [
        "decode_attention_triton",
        "gated_delta_rule",
        "grouped_matmul",
        "ragged_paged_attention",
        "state_space",
    ]

# Registered last, so that a GPU for which they are made runs them where they support the call.
from model_adapters.ops.gpu import decode_attention_mosaic, paged_attention_mosaic

__all__ += ["decode_attention_mosaic", "paged_attention_mosaic"]
