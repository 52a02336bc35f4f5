"""The multi-token prediction layer, as DeepSeek-V3 and GLM-4.5 have it.

``model.layers.<num_hidden_layers>`` is a decoder layer of the model's own kind, with norms of the next token's
embedding and of the model's last hidden state, ``enorm`` and ``hnorm``, their projection ``eh_proj``, and a norm and
head of its own, ``shared_head`` (DeepSeek-V3, arXiv:2412.19437, section 2.2). transformers leaves it unread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from model_adapters.draft_heads.head_module import HeadOutput, cache_argument, causal_mask, own_base_class


class _SharedHead(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.norm, self.head = norm, head


class _Layers(nn.Module):
    """Embedding and rotary embedding of a base model, and the layer by its number."""

    def __init__(self, number: int, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer})
        self.rotary_emb = rotary


class MtpHead(PreTrainedModel):
    """The head of the model that `mtp_class` was made for, with the checkpoint's names."""

    number: int
    kinds: dict[str, Any]
    base_model_prefix = "model"

    def __init__(self, config: Any) -> None:
        super().__init__(_with_layer(config, self.number))
        kinds, size = self.kinds, config.hidden_size
        layer = kinds["layer"](config, self.number)
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = 0  # in a cache of its own
        norm_args = (size, kinds["eps"])
        layer.embed_tokens = nn.Embedding(config.vocab_size, size)
        layer.enorm, layer.hnorm = kinds["norm"](*norm_args), kinds["norm"](*norm_args)
        layer.eh_proj = nn.Linear(2 * size, size, bias=False)
        layer.shared_head = _SharedHead(kinds["norm"](*norm_args), nn.Linear(size, config.vocab_size, bias=False))
        self.model = _Layers(self.number, layer, kinds["rotary"](config))
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """Implements transformers' method, which looks elsewhere."""
        return self._layer.embed_tokens

    def get_output_embeddings(self) -> Any:
        """Implements transformers' method, which looks elsewhere."""
        return self._layer.shared_head.head

    @property
    def _layer(self) -> Any:
        return self.model.layers[str(self.number)]

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
        """Returns the logits of the token behind each of `input_ids`, and the layer's hidden states.

        Args:
            input_ids: int[1, tokens].
            position_ids: int[1, tokens], of the hidden states, which are those of the tokens before.
            captured: float[1, tokens, hidden], the model's hidden states behind its last norm.
            hidden: float[1, tokens, hidden], of this layer, in their place.
            logits_to_keep: Indices of the tokens that results are wanted of.
            past_key_values: Cache with one layer.
            return_dict: Not used.
        """
        layer = self._layer
        embeds = layer.embed_tokens(input_ids)
        before = captured if hidden is None else hidden
        out = layer.eh_proj(torch.cat((layer.enorm(embeds), layer.hnorm(before)), dim=-1))
        attention = {
            "position_embeddings": self.model.rotary_emb(embeds, position_ids),
            "attention_mask": causal_mask(self.config, embeds, past_key_values, position_ids),
            "position_ids": position_ids,
            cache_argument(type(layer).forward): past_key_values,
        }
        out = layer(out, **attention)
        out = (out[0] if isinstance(out, tuple) else out)[:, logits_to_keep]  # GLM-5's return chosen tokens, too
        return HeadOutput(logits=layer.shared_head.head(layer.shared_head.norm(out)), hidden=out)


def _with_layer(config: Any, number: int) -> Any:
    """Returns the configuration with a kind of layer `number` where it has one for each layer.

    The layer is one as the last, with an indexer of its own where layers of the model may share one (GLM-5).
    """
    for name, own in (("layer_types", None), ("mlp_layer_types", None), ("indexer_types", "full")):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) == number:
            setattr(config, name, [*kinds, own or kinds[-1]])
    return config


def mtp_class(module: PreTrainedModel) -> type[MtpHead]:
    """Returns the class of the head of a model, made of the model's own parts.

    Raises:
        UnsupportedModelError: the model is not built as DeepSeek-V3 is.
    """
    base: Any = module.base_model
    own = own_base_class(module, base, "DeepSeek-V3")
    kinds = {
        "layer": type(base.layers[-1]),
        "norm": type(base.norm),
        "rotary": type(base.rotary_emb),
        "eps": base.norm.variance_epsilon,
    }
    # transformers reads in the file of a class what its layers support.
    parts: dict[str, Any] = {"number": len(base.layers), "kinds": kinds, "__module__": own.__module__}
    return type("MtpHead", (MtpHead, own), parts)
