"""Names of the C++ kernels in programs."""

from __future__ import annotations

TARGETS = (
    "tas_activation",
    "tas_causal_convolution",
    "tas_cross_attention",
    "tas_decode_attention",
    "tas_dense_attention",
    "tas_gated_delta_rule",
    "tas_linear",
    "tas_linear_recurrence",
    "tas_lora",
    "tas_packed_linear",
    "tas_packed_routed_linear",
    "tas_paged_attention",
    "tas_quantized_linear",
    "tas_quantized_routed_linear",
    "tas_read_tokens",
    "tas_rms_norm",
    "tas_routed_linear",
    "tas_row_sum",
    "tas_selective_scan",
    "tas_state_space",
    "tas_unpack",
    "tas_unpack_rows",
    "tas_varlen_attention",
    "tas_write_pages",
    "tas_write_tokens",
)
ROW_BY_ROW = (
    "tas_activation",
    "tas_linear",
    "tas_packed_linear",
    "tas_quantized_linear",
    "tas_rms_norm",
    "tas_row_sum",
)
"""Targets that compute each row of their result from the same row of their first operand."""
ROW_OPERANDS = {
    **dict.fromkeys(ROW_BY_ROW, 1),
    "tas_lora": 3,
    "tas_packed_routed_linear": 2,
    "tas_quantized_routed_linear": 2,
    "tas_routed_linear": 2,
}
"""Targets that compute each row of their result from the same row of some operands: the number of these, which come
first."""
