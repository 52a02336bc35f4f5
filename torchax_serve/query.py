"""A forward's new tokens on their way to the device, and what comes back cut to their length."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import torch

from model_adapters.bridge import to_jax_array
from model_adapters.caches import AttentionLayer, DeviceCache


@dataclasses.dataclass(frozen=True)
class Query:
    """A forward's new tokens on their way to the device."""

    name: str  # such as "input_ids" or "inputs_embeds"
    tensor: torch.Tensor  # int64[batch, len] or float[batch, len, hidden]
    padded_len: int

    @property
    def batch(self) -> int:
        """Rows."""
        return self.tensor.shape[0]

    @property
    def len(self) -> int:
        """Tokens per row before padding."""
        return self.tensor.shape[1]


def pad_tokens(tensor: torch.Tensor, length: int) -> jax.Array:
    """Pads the second dimension of ids [batch, len] or embeddings [batch, len, hidden] on the right with zeros."""
    missing = length - tensor.shape[1]
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros((tensor.shape[0], missing, *tensor.shape[2:]))], 1)
    return to_jax_array(tensor)


def pad_positions(tensor: torch.Tensor, length: int) -> jax.Array:
    """Pads the last dimension of positions [batch, len] or [axes, batch, len] on the right with the last value."""
    missing = length - tensor.shape[-1]
    if missing:
        tensor = torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], missing)], -1)
    return to_jax_array(tensor)


def cut(fields: dict[str, Any], query: Query, past: int, keep: Any, cache: DeviceCache | None) -> dict[str, Any]:
    """Takes the padding off again."""
    cut = dict(fields)
    if "logits" in cut and (isinstance(keep, torch.Tensor) or keep != 1):
        # Without padding there is nothing to take off: some models put images before the text, and these logits, too.
        logits = cut["logits"] if query.len == query.padded_len else cut["logits"][:, : query.len]
        cut["logits"] = logits if isinstance(keep, torch.Tensor) else logits[:, -keep:]
    if "last_hidden_state" in cut:
        cut["last_hidden_state"] = cut["last_hidden_state"][:, : query.len]
    if cut.get("hidden_states") is not None:
        cut["hidden_states"] = tuple(layer[:, : query.len] for layer in cut["hidden_states"])
    if cut.get("attentions") is not None:
        states = [] if cache is None else cache.states
        kept = []
        for index, layer in enumerate(cut["attentions"]):
            state = states[index] if index < len(states) else None
            first = 0
            if isinstance(state, AttentionLayer) and state.window is not None:
                first = max(0, past - state.window + 1)  # a sliding layer of transformers has forgotten the rest
            kept.append(layer[:, :, : query.len, first : past + query.len])
        cut["attentions"] = tuple(kept)
    return cut
