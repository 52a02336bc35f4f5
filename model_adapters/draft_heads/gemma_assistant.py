"""Gemma 4's assistant: a draft model that reads the keys and values of its target.

All of its layers attend to what the last layers of the served model have stored, one of each kind, so that it has no
cache. It drafts from the embedding of the last token beside the hidden state in front of it, at the position of the
last token, and goes on from its own output there (transformers' `SinglePositionMultiTokenCandidateGenerator`).
"""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from transformers import PreTrainedModel

from model_adapters.attention import CausalMask
from model_adapters.bridge.views import torch_view
from model_adapters.draft_heads.head_module import HeadOutput
from model_adapters.draft_heads.head_sharding import assistant_sharding
from model_adapters.draft_heads.loaded_head import LoadedAssistant
from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.loaded_model import LoadedModel
from model_adapters.program.model_program import ModelProgram

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types of transformers."""


class AssistantHead(PreTrainedModel):
    """The assistant beside the embedding of the model that it drafts for."""

    def __init__(self, assistant: Any, embed_tokens: nn.Module) -> None:
        super().__init__(assistant.config)
        self.assistant, self.embed_tokens = assistant, embed_tokens

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden: torch.Tensor,
        shared_kv_states: Any,
        windows: Any,
        return_dict: bool = True,
    ) -> HeadOutput:
        """Returns next-token logits of each of `input_ids`, and hidden states for the next.

        Args:
            input_ids: int[1, tokens].
            position_ids: int[1, tokens].
            hidden: float[1, tokens, hidden], the model's in front of each token, or this head's own.
            shared_kv_states: Keys and values by kind of layer, annotated with their pages.
            windows: Most keys that a layer of each kind sees, or None.
            return_dict: Not used.
        """
        assistant = self.assistant
        embeds = assistant.pre_projection(torch.cat((self.embed_tokens(input_ids), hidden), dim=-1))
        out = assistant.model(
            inputs_embeds=embeds,
            attention_mask={kind: _mask(window) for kind, window in windows.items()},
            position_ids=position_ids,
            shared_kv_states=shared_kv_states,
            use_cache=False,
            logits_to_keep=slice(None),  # 0, the default, would cut masks, which loses their annotations
        ).last_hidden_state
        logits = assistant.lm_head(out) if assistant.masked_embedding is None else self._ordered_logits(out)
        return HeadOutput(logits=logits, hidden=assistant.post_projection(out))

    def _ordered_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits of the likeliest clusters of tokens; minus infinity for all others.

        transformers' module fills in a number that it reads from the device, which a trace cannot.
        """
        part = self.assistant.masked_embedding
        clusters = torch.topk(part.centroids(hidden), k=part.centroid_intermediate_top_k, dim=-1).indices
        ordering = part.token_ordering.long().view(part.num_centroids, part.vocab_size_per_centroid)
        ids = ordering[clusters].flatten(-2)
        logits = (self.assistant.lm_head.weight[ids] @ hidden[..., None])[..., 0]
        others = torch.full((*hidden.shape[:2], part.vocab_size), -torch.inf, dtype=hidden.dtype, device=hidden.device)
        return others.scatter(-1, ids, logits)


def _mask(window: int | None) -> Any:
    mask: Any = torch_view(jnp.ones((1, 1, 1, 1), jax.dtypes.canonicalize_dtype(bool)))
    mask.causal_mask = CausalMask(window, None)
    return mask


def has_assistant(target: LoadedModel) -> bool:
    """Tells whether the model stores keys and values that an assistant can read."""
    return hasattr(target.config.get_text_config(), "kv_sharing_modes")


def assistant_of(loaded: LoadedModel, target: LoadedModel) -> LoadedAssistant:
    """Returns the loaded assistant as the draft head of `target`.

    Raises:
        InvalidArgumentError: it is of another model.
    """
    name = str(loaded.source.name)
    config, theirs = loaded.config, target.config.get_text_config()
    ours = config.get_text_config()
    if not has_assistant(target):
        raise InvalidArgumentError(
            f"speculative_config: model: expected a draft model for {type(target.module).__name__}, got {name}, which "
            "drafts for models of Gemma 4; choose another draft model"
        )
    sizes = {"hidden_size": theirs.hidden_size, "vocab_size": theirs.vocab_size}
    got = {"hidden_size": config.backbone_hidden_size, "vocab_size": ours.vocab_size}
    reads = tuple(_read_layer(name, kind, ours, theirs) for kind in dict.fromkeys(ours.layer_types))
    if got != sizes:
        raise InvalidArgumentError(
            f"speculative_config: model: expected an assistant of the served model, {sizes}, got {got} from {name}; "
            "choose the assistant of this model"
        )
    embed_tokens = copy.copy(target.module.get_input_embeddings())
    embed_tokens._parameters, embed_tokens._buffers = dict(embed_tokens._parameters), dict(embed_tokens._buffers)
    own = next(cls for cls in type(loaded.module).__mro__ if cls.__name__.endswith("PreTrainedModel"))
    parts: dict[str, Any] = {"__module__": own.__module__}  # where transformers reads what its layers support
    head = type("AssistantHead", (AssistantHead, own), parts)(loaded.module, embed_tokens).eval()
    path = next(path for path, part in target.module.named_modules() if part is target.module.get_input_embeddings())
    shared = {
        f"embed_tokens.{tensor}": f"{path}.{tensor}"
        for tensor in ("weight", "embed_scale")
        if f"{path}.{tensor}" in target.weights
    }
    weights = {f"assistant.{tensor}": array for tensor, array in loaded.weights.items()}
    program = ModelProgram(head, assistant_sharding(loaded, target, shared))
    return LoadedAssistant(name, program, weights, shared, (-1,), reads=reads)


def _read_layer(name: str, kind: str, ours: Any, theirs: Any) -> tuple[str, int, int]:
    """Returns a kind of layer, the layer of the model it reads, and columns of its keys."""
    stored = [i for i, mode in enumerate(theirs.kv_sharing_modes) if mode == "store" and theirs.layer_types[i] == kind]
    own = ours.per_layer_config[ours.layer_types.index(kind)]
    read = theirs.per_layer_config[stored[0]] if stored else None
    wanted = own.num_key_value_heads, own.head_dim
    if read is None or (read.num_key_value_heads, read.head_dim) != wanted:
        found = None if read is None else (read.num_key_value_heads, read.head_dim)
        raise InvalidArgumentError(
            f"speculative_config: model: expected {wanted[0]} heads of {wanted[1]} columns in the served model's "
            f"layers of {kind}, which {name} reads, got {found}; choose the assistant of this model"
        )
    return kind, stored[0], own.head_dim
