"""Texts of a model that has its PyTorch module: its forwards, embedders and head."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel
from model_adapters.loading.checkpoint import PICKLE_FILE, SAFE_FILE, Checkpoint, pickle_only
from model_adapters.ops import registry
from model_adapters.ops.cpu.ffi import DTYPES, missing
from model_adapters.program.model_program import CallSpec
from model_adapters.program.padding_safety import can_batch_padded
from model_adapters.program.varlen_forward import varlen_reason
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.pooling.classification import HEADS, TextHead
from torchax_serve.pooling.embedding import CHOICES, HIDDEN, Embedder
from torchax_serve.pooling.layers import ANY_POOLING
from torchax_serve.pooling.sentence_transformers import EmbeddingRule, LayerFiles, rule_in
from torchax_serve.pooling.text_program import TextProgram
from torchax_serve.pooling.text_rule import read_json
from torchax_serve.pooling.text_tokenizer import IDS, MASK, TextTokenizer
from torchax_serve.pooling.token_rule import VectorTokens
from torchax_serve.runtime.model_runtime import ModelRuntime

logger = logging.getLogger("torchax_serve")

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
        self._packs: dict[frozenset[str], bool] = {}
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

    def packs(self, names: Iterable[str]) -> bool:
        """Returns whether texts can stand in one row: a trial has shown that it changes no result."""
        asked = frozenset(names)
        if asked not in self._packs:
            program, executables = self.runtime.program, self.runtime.steps.executables
            reason = varlen_reason(program) or _no_kernel(program.target.dtype)
            if reason is None:  # the trial of an earlier start counts
                described = f"{program.submodule}: {', '.join(sorted(asked))}"
                reason = executables.memoize("texts in one row", described, lambda: self._unpackable(sorted(asked)))
            self._packs[asked] = reason is None
            if reason is not None:
                logger.debug("texts of %s are padded: %s", self.class_name, reason)
        return self._packs[asked]

    def forward_packed(self, arrays: Mapping[str, np.ndarray], cu_seqlens: np.ndarray) -> dict[str, Any]:
        """Runs a forward over texts in one row."""
        with self._padding_from_now_on():
            return self.runtime.forward_varlen(arrays, cu_seqlens)

    def compile_packed(self, arrays: Mapping[str, Any], cu_seqlens: Any) -> dict[str, Any]:
        """Compiles a forward over texts in one row; returns the shapes of its output."""
        with self._padding_from_now_on():
            program = self.runtime.steps.varlen.compiled(self.runtime.weights, dict(arrays), cu_seqlens, spec=None)
        fields: dict[str, Any] = program.out_info
        return fields

    @contextlib.contextmanager
    def _padding_from_now_on(self) -> Iterator[None]:
        """Has texts padded if one that is longer than those of the trial cannot stand in a row."""
        try:
            yield
        except NotPackableError as reason:
            logger.info("texts of %s are padded from now on: %s", self.class_name, reason)
            self._packs = dict.fromkeys(self._packs, False)
            raise

    def _unpackable(self, names: list[str]) -> str | None:
        """Returns why texts cannot stand in one row; None if a trial shows that they can.

        Each of two texts then gets what it gets by itself.
        """
        lens, size = _TRIAL
        rng = np.random.default_rng(0)
        ids = [rng.integers(0, self.vocab_size, length, dtype=np.int32) for length in lens]
        packed = {name: np.zeros(size, np.int32) for name in names if name != MASK}
        packed[IDS][: sum(lens)] = np.concatenate(ids)
        ends = np.full(size // 2 + 1, sum(lens), np.int32)
        ends[:2] = 0, lens[0]
        try:
            return _difference([self._separately(text, names) for text in ids], self.forward_packed(packed, ends))
        except UnsupportedModelError as error:
            return str(error)
        except Exception as error:  # whatever model code raises of a row of texts
            return f"{type(error).__name__}: {error}".splitlines()[0]

    def _separately(self, ids: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
        """Returns what the tokens of one text get by field, padded if texts are."""
        length = max(_TRIAL[0]) if self.can_pad else len(ids)
        given = {name: np.zeros((1, length), np.int32) for name in names}
        given[IDS][0, : len(ids)] = ids
        if MASK in given:
            given[MASK][0, : len(ids)] = 1
        fields = self.forward(given)
        return {name: np.asarray(array)[0, : len(ids)] for name, array in fields.items() if array.ndim > 1}


_TRIAL = (5, 9), 16
"""Tokens of the texts of a trial, and the size of their row."""


def _no_kernel(dtype: torch.dtype) -> str | None:
    """Returns why there is no kernel of a row of texts; None if there is one."""
    if registry.platform() != "cpu":
        return f"there is no kernel of a row of texts on a {registry.platform()}"
    if str(dtype).removeprefix("torch.") not in map(str, DTYPES):
        return f"there is no kernel for {dtype}"
    return missing()


def _difference(separate: Sequence[Mapping[str, np.ndarray]], together: Mapping[str, Any]) -> str | None:
    """Returns which field of texts in one row differs from theirs by themselves; None: none.

    Roundings do not count: a token that reads another text, or another position, differs by more.
    """
    for name, array in together.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            continue
        wanted = np.concatenate([fields[name] for fields in separate]).astype(np.float64)
        allowed = _ROUNDING[array.dtype.itemsize] * np.abs(wanted).max()
        if not np.abs(wanted - np.asarray(array, np.float64)[: len(wanted)]).max() <= allowed:
            return f"{name} of a text depends on the texts beside it"
    return None if HIDDEN in together or "logits" in together else "it returns no row for each token"


_ROUNDING = {2: 0.06, 4: 1e-3, 8: 1e-3}
"""Largest difference by bytes of a number, as a part of the largest number."""


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
