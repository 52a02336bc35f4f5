"""The multi-token prediction layer, as Qwen3-Next and Qwen3.5 have it: tensors ``mtp.*``.

A decoder layer of full attention reads the next token's embedding beside the model's last hidden state, each with a
norm, through the projection ``fc``. Its output, behind a norm of its own, is what the model's head takes, and the next
draft in the place of the model's hidden state. Embedding and head are the model's. transformers leaves it unread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from model_adapters.draft_heads.head_module import HeadOutput, cache_argument, causal_mask, own_base_class

PREFIX = "mtp."
"""Begin of the names of its tensors."""


class _Mtp(nn.Module):
    def __init__(self, config: Any, layer: type[nn.Module], norm: type[nn.Module]) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(size, eps=eps), norm(size, eps=eps)
        self.layers = nn.ModuleList([layer(config, 0)])
        self.norm = norm(size, eps=eps)


class PrefixedMtpHead(PreTrainedModel):
    """The head of the model that `prefixed_mtp_class` was made for, with the checkpoint's names."""

    kinds: dict[str, Any]
    base_model_prefix = ""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mtp: Any = _Mtp(config, self.kinds["layer"], self.kinds["norm"])
        self.rotary_emb = self.kinds["rotary"](config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
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
            captured: float[1, tokens, hidden], the model's hidden states behind its last norm.
            hidden: float[1, tokens, hidden], of this head, in their place.
            logits_to_keep: Indices of the tokens that results are wanted of.
            past_key_values: Cache with one layer.
            return_dict: Not used.
        """
        embeds, before = self.embed_tokens(input_ids), captured if hidden is None else hidden
        mtp = self.mtp
        both = torch.cat((mtp.pre_fc_norm_embedding(embeds), mtp.pre_fc_norm_hidden(before)), dim=-1)
        layer = mtp.layers[0]
        attention = {
            "position_embeddings": self.rotary_emb(embeds, position_ids),
            "attention_mask": causal_mask(self.config, embeds, past_key_values, position_ids),
            "position_ids": position_ids,
            cache_argument(type(layer).forward): past_key_values,
        }
        out = mtp.norm(layer(mtp.fc(both), **attention)[:, logits_to_keep])
        return HeadOutput(logits=self.lm_head(out), hidden=out)


def prefixed_mtp_class(module: PreTrainedModel) -> type[PrefixedMtpHead]:
    """Returns the class of the head of a model, made of the model's own parts.

    Raises:
        UnsupportedModelError: the model is not built as Qwen3-Next is.
    """
    base: Any = module.base_model
    base = getattr(base, "language_model", base)
    own = own_base_class(module, base, "Qwen3-Next")
    kinds = {"layer": type(base.layers[-1]), "norm": type(base.norm), "rotary": type(base.rotary_emb)}
    # transformers reads in the file of a class what its layers support.
    return type("PrefixedMtpHead", (PrefixedMtpHead, own), {"kinds": kinds, "__module__": own.__module__})


def one_attention_layer(config: Any) -> Any:
    """Returns `config`, changed to that of the head: one layer, of full attention."""
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"]
    return config
