"""Texts of a model that has its PyTorch module: its forwards, embedders and head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel
from model_adapters.loading.checkpoint import PICKLE_FILE, SAFE_FILE, Checkpoint, pickle_only
from model_adapters.program.model_program import CallSpec
from model_adapters.program.padding_safety import can_batch_padded
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.pooling.classification import HEADS, TextHead
from torchax_serve.pooling.embedding import CHOICES, Embedder
from torchax_serve.pooling.layers import ANY_POOLING
from torchax_serve.pooling.sentence_transformers import EmbeddingRule, LayerFiles, rule_in
from torchax_serve.pooling.text_program import TextProgram
from torchax_serve.pooling.text_rule import read_json
from torchax_serve.pooling.text_tokenizer import MASK, TextTokenizer
from torchax_serve.pooling.token_rule import VectorTokens
from torchax_serve.runtime.model_runtime import ModelRuntime

_READS_NO_PROMPT = {"hkunlp/instructor-base", "hkunlp/instructor-large", "hkunlp/instructor-xl"}
"""Checkpoints that are older than the setting; sentence-transformers has them by name."""

_BY_ENCODER = {"blenderbot", "blenderbot-small", "longt5", "m2m_100", "marian", "mt5", "pegasus", "pegasus_x", "t5"}
_BY_ENCODER |= {"prophetnet", "switch_transformers", "t5gemma", "t5gemma2", "udop", "umt5"}
"""Encoder-decoder types of which sentence-transformers runs the encoder only."""


Made = TypeVar("Made", bound=Embedder)


class ModuleTexts(TextProgram):
    """Forwards of a module.

    Args:
        runtime: Of the submodule that is called.
    """

    def __init__(self, runtime: ModelRuntime) -> None:
        self.runtime = runtime
        cache = runtime.steps.executables  # on a mesh hidden states come to one device
        self.pools = ExecutableCache(cache.folder, cache.identity) if cache.mesh is None else ExecutableCache()

    @property
    def class_name(self) -> str:
        """Class of the module that is called."""
        return type(self.runtime.program.target).__name__

    @property
    def can_pad(self) -> bool:
        """Whether texts of different lengths can be rows of one batch."""
        program = self.runtime.program
        is_safe = program.accepts(MASK) and can_batch_padded(program.target)
        return is_safe and program.rope is None  # its frequencies depend on the padded length

    @property
    def vocab_size(self) -> int:
        """Token ids are below."""
        return self.runtime.limits.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Most tokens of a row."""
        return self.runtime.limits.max_positions

    @property
    def num_programs(self) -> int:
        """Programs of forwards in memory."""
        return self.runtime.steps.forward.num_programs

    def accepts(self, name: str) -> bool:
        """Returns whether the forward has an argument of this name."""
        return self.runtime.program.accepts(name)

    def forward(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Runs a forward."""
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return self.runtime.forward_unpadded(given, CallSpec())

    def compile(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Compiles a forward; returns the shapes of its output."""
        step = self.runtime.steps.forward
        program = step.compiled(self.runtime.weights, None, None, dict(arrays), spec=CallSpec())
        fields: dict[str, Any] = program.out_info[0]
        return fields


class _AnyEmbedder(Embedder):
    """An embedder without the checkpoint's files: each request chooses the pooling."""


def own_embedder(loaded: LoadedModel, runtime: ModelRuntime) -> Embedder:
    """Returns the embedder by the checkpoint's files of sentence-transformers.

    Raises:
        InvalidArgumentError: there are none.
        CheckpointError: files that are not readable.
        UnsupportedModelError: a setting in them that is not supported.
    """
    return loaded.once(Embedder, lambda: _embedder(Embedder, loaded, runtime, _own_rule(loaded)))


def any_embedder(loaded: LoadedModel, runtime: ModelRuntime) -> Embedder:
    """Returns the embedder for requests that choose their pooling."""
    rule = EmbeddingRule((ANY_POOLING,), (None,))
    return loaded.once(_AnyEmbedder, lambda: _embedder(_AnyEmbedder, loaded, runtime, rule))


def _embedder(cls: type[Made], loaded: LoadedModel, runtime: ModelRuntime, rule: EmbeddingRule) -> Made:
    reads_logits = any(layer.kind == "splade" for layer in rule.layers)
    part = runtime if reads_logits else runtime.submodule(part_of(runtime))
    tokens = None
    if rule.tokens is not None:
        tokens = VectorTokens.of(rule.tokens, _tokenizer_of(loaded), loaded.source.name)
    prefixes = () if rule.tokens is None else rule.tokens.prefixes
    return cls(
        loaded.source.name,
        ModuleTexts(part),
        rule.layers,
        tuple(_weights_of(files, allow_pickle=loaded.allow_pickle) for files in rule.files),
        rule.text,
        TextTokenizer(loaded, lower_case=rule.text.lower_case, prefixes=prefixes),
        pad_id_of(loaded, runtime),
        limit_of(loaded, part, rule.text.max_len),
        tokens,
    )


def _tokenizer_of(loaded: LoadedModel) -> Any:
    """Returns the tokenizer; raises CheckpointError if the model came without one."""
    tokenizer = loaded.tokenizer()
    if tokenizer is None:
        raise CheckpointError(f"{loaded.source.name}: expected the files of a tokenizer next to the weights, got none")
    return tokenizer


def head_of(loaded: LoadedModel, runtime: ModelRuntime) -> TextHead:
    """Returns the model as one that labels texts or tokens, as its configuration is now.

    Its class may have no such head, which its tasks say.
    """
    config: Any = runtime.config
    class_name = type(runtime.program.module).__name__
    reads_one_token = not class_name.endswith(HEADS["classify_tokens"])
    return TextHead(
        name=loaded.source.name,
        class_name=class_name,
        program=loaded.once(ModuleTexts, lambda: ModuleTexts(runtime)),
        tokenizer=loaded.once(TextTokenizer, lambda: TextTokenizer(loaded)),
        pad_id=(pad_id_of_head if reads_one_token else pad_id_of)(loaded, runtime),
        max_len=limit_of(loaded, runtime),
        labels={int(index): str(label) for index, label in (config.id2label or {}).items()},
        problem_type=config.problem_type,
        pair_activation=_pair_activation(loaded, runtime),
        lack=loaded.report.lack,
    )


def _pair_activation(loaded: LoadedModel, runtime: ModelRuntime) -> str:
    """Returns the name of a cross-encoder's activation of scores; Sigmoid by default."""
    settings = getattr(runtime.config, "sentence_transformers", None) or {}
    name = settings.get("activation_fn") or getattr(runtime.config, "sbert_ce_default_activation_function", None)
    if name is None and loaded.files_folder is not None:
        name = read_json(loaded.files_folder / "config_sentence_transformers.json", optional=True).get("activation_fn")
    return "Sigmoid" if name is None else str(name)


def pad_id_of_head(loaded: LoadedModel, runtime: ModelRuntime) -> int | None:
    """Returns the padding token of a head that reads one token of a text; None for others.

    Such a head finds the last token by the config's pad_token_id.
    """
    knows_padding = getattr(runtime.config.get_text_config(), "pad_token_id", None) is not None
    is_plain = knows_padding and not runtime.program.names.has_encoder
    return pad_id_of(loaded, runtime) if is_plain else None


def part_of(runtime: ModelRuntime) -> str:
    """Returns the name of the submodule that computes hidden states of tokens.

    It is the encoder, or the model under its head.
    """
    if runtime.encoder is not None:
        return runtime.encoder.name
    module = runtime.program.module
    base = module.base_model
    return next((name for name, child in module.named_modules() if child is base), "")


def pad_id_of(loaded: LoadedModel, runtime: ModelRuntime) -> int:
    """Returns the padding token; it is masked, so any token of the vocabulary does."""
    for holder in (runtime.config.get_text_config(), loaded.tokenizer()):
        found = getattr(holder, "pad_token_id", None)
        if isinstance(found, int) and 0 <= found < runtime.limits.vocab_size:
            return found
    return 0


def limit_of(loaded: LoadedModel, runtime: ModelRuntime, file_limit: int | None = None) -> int | None:
    """Returns the most tokens of a text; None if nothing limits them.

    Args:
        loaded: the model.
        runtime: of the submodule that is called.
        file_limit: limit in the checkpoint's files, in place of the tokenizer's; the model's positions always count.
    """
    limit = runtime.limits.max_positions
    padding_idx = getattr(runtime.config, "pad_token_id", None)
    tables = [m for m in runtime.program.target.modules() if isinstance(m, torch.nn.Embedding)]
    if (
        limit is not None
        and padding_idx is not None
        and any(t.padding_idx is not None and t.num_embeddings == limit for t in tables)
    ):
        limit -= padding_idx + 1  # RoBERTa's positions start after the padding index
    tokenizer_limit = getattr(loaded.tokenizer(), "model_max_length", None) if file_limit is None else file_limit
    limits = [x for x in (limit, tokenizer_limit) if x is not None and x < 10**9]
    return min(limits, default=None)


def _own_rule(loaded: LoadedModel) -> EmbeddingRule:
    rule = rule_in(loaded.files_folder)
    if rule is None:
        raise InvalidArgumentError(
            f"embed: {loaded.source.name} has no modules.json that says how its tokens become one embedding; pass "
            f"pooling, one of {CHOICES}"
        )
    if loaded.config.is_encoder_decoder and loaded.config.model_type not in _BY_ENCODER:
        raise UnsupportedModelError(
            f"embed: sentence-transformers embeds by the decoder of a model of type {loaded.config.model_type}, which "
            f"is not done here; pass pooling, one of {CHOICES}, to embed by its encoder"
        )
    if loaded.source.hub_id in _READS_NO_PROMPT:
        layers = tuple(dataclasses.replace(layer, reads_prompt=False) for layer in rule.layers)
        rule = dataclasses.replace(rule, layers=layers)
    return rule


def _weights_of(files: LayerFiles | None, *, allow_pickle: bool) -> dict[str, jax.Array]:
    if files is None:
        return {}
    there = [files.folder / name for name in (SAFE_FILE, PICKLE_FILE) if (files.folder / name).is_file()]
    if not there:
        raise CheckpointError(f"{files.folder} holds no {SAFE_FILE}, which the weights of its layer are expected in")
    if there[0].name == PICKLE_FILE and not allow_pickle:
        raise pickle_only(str(files.folder))
    with Checkpoint.of(there[:1]).readers(lambda amount: None) as readers:
        tensors = {name: reader[...].to(torch.float32).numpy() for name, reader in readers.items()}
    if set(tensors) != set(files.shapes):
        raise CheckpointError(
            f"{there[0]}: expected tensors {', '.join(sorted(files.shapes))}, got {', '.join(sorted(tensors))}"
        )
    for name, shape in files.shapes.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{there[0]}: {name} is {list(tensors[name].shape)}, expected {list(shape)} by the config.json next "
                "to it"
            )
    return {name: jnp.asarray(array) for name, array in tensors.items()}
