"""EAGLE-3's draft head (Li et al., 2025, arXiv:2503.01840), in its public layout.

One decoder layer of Llama's kind reads the next token's embedding beside a projection of three hidden states of the
served model, ``fc``; for further tokens, beside its own output. Its ``lm_head`` has the columns of a smaller
vocabulary: column i is token ``i + d2t[i]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from model_adapters.draft_heads.head_module import HeadOutput, cache_argument, causal_mask

NUM_HIDDEN = 3
"""Hidden states of the served model that ``fc`` projects."""


class Eagle3Layer(nn.Module):
    """The decoder layer: its attention reads two hidden states side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn: Any = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self.self_attn, name)
            wider = nn.Linear(2 * config.hidden_size, own.out_features, bias=own.bias is not None)
            setattr(self.self_attn, name, wider)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.norms_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Returns the hidden state of each token, [1, tokens, hidden], before the last norm."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norms_residual else hidden
        attended, _ = self.self_attn(torch.cat((self.input_layernorm(embeds), normed), dim=-1), **attention)
        residual = residual + attended
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Head(LlamaPreTrainedModel):
    """The head; `config` is that of its checkpoint."""

    base_model_prefix = ""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        columns = getattr(config, "draft_vocab_size", None) or config.vocab_size
        target_size = getattr(config, "target_hidden_size", None) or config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(NUM_HIDDEN * target_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, columns, bias=False)
        self.rotary_emb: Any = LlamaRotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        captured: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        logits_to_keep: torch.Tensor | slice = slice(None),
        past_key_values: Any = None,
        return_dict: bool = True,
    ) -> HeadOutput:
        """Returns the logits of the token behind each of `input_ids`, and the head's hidden states.

        Args:
            input_ids: int[1, tokens].
            position_ids: int[1, tokens], of the hidden states, which are those of the tokens before.
            captured: float[1, tokens, 3 * target's hidden], hidden states of the served model side by side.
            hidden: float[1, tokens, hidden], of this head, in their place.
            logits_to_keep: Indices of the tokens that results are wanted of.
            past_key_values: Cache with one layer.
            return_dict: Not used.
        """
        hidden = self.fc(captured) if hidden is None else hidden
        embeds = self.embed_tokens(input_ids)
        attention = {
            "position_embeddings": self.rotary_emb(embeds, position_ids),
            "attention_mask": causal_mask(self.config, embeds, past_key_values, position_ids),
            cache_argument(LlamaAttention.forward): past_key_values,
        }
        out = self.midlayer(embeds, hidden, **attention)[:, logits_to_keep]
        return HeadOutput(logits=self.lm_head(self.norm(out)), hidden=out)
