"""Exports the forwards of an encoder, one program for each shape of a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerFast

from model_adapters.errors import InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from model_adapters.loading import LoadedModel
from model_adapters.ops.compressed_weight import Weight
from model_adapters.program.model_program import CallSpec
from torchax_serve.engine.options import EngineOptions
from torchax_serve.export.layout import POOLING, POOLING_WEIGHT, TEXTS
from torchax_serve.export.program_writer import ProgramWriter
from torchax_serve.export.programs import program_key
from torchax_serve.export.targets import ExportTarget
from torchax_serve.export.text_encoder import BundleTextEncoder
from torchax_serve.pooling.batching import batch_arguments, batch_shapes, pads_texts
from torchax_serve.pooling.classification import HEADS, TextHead
from torchax_serve.pooling.embedding import Embedder
from torchax_serve.pooling.module_texts import ModuleTexts, any_embedder, head_of, own_embedder
from torchax_serve.pooling.text_program import MAX_ROWS
from torchax_serve.pooling.text_tokenizer import IDS, TextEncoder
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.start.recorded_objects import PROBES, TokenizerRecord

_ARGUMENTS = frozenset({IDS, "token_type_ids"})
"""Arguments that `tokenizers` makes of a text."""
_METHODS = ("__call__", "_encode_plus", "convert_ids_to_tokens", "backend_tokenizer")
"""Methods of transformers' fast tokenizers; a class with others of its own is not exported."""


@dataclasses.dataclass(frozen=True)
class TextsExporter:
    """Exports a model that returns embeddings, labels or scores.

    Attributes:
        runtime: The complete model.
        model: How it reads texts: as one with a head, or with hidden states.
        own: The embedder by the checkpoint's files; None if there are none, or the model has a head.
        max_len: Most tokens of a text.
        max_rows: Most texts of a batch.
    """

    runtime: ModelRuntime
    model: TextHead | Embedder
    own: Embedder | None
    max_len: int
    max_rows: int

    @classmethod
    def of(cls, loaded: LoadedModel, runtime: ModelRuntime, options: EngineOptions) -> TextsExporter:
        """Returns the exporter of a model.

        Args:
            loaded: The model as it was loaded.
            runtime: The same, with its programs.
            options: Their ``max_model_len`` and ``max_num_seqs`` count, the latter rounded down to a power of two.

        Raises:
            UnsupportedModelError: its texts need the PyTorch model.
            InvalidArgumentError: nothing limits the length of a text.
        """
        class_name = type(loaded.module).__name__
        has_head = class_name.endswith(tuple(HEADS.values()))
        model: TextHead | Embedder = head_of(loaded, runtime) if has_head else any_embedder(loaded, runtime)
        if runtime.program.sharding is not None:
            raise UnsupportedModelError(
                f"export: expected a model that reads texts on one device, got {class_name} on a mesh; leave mesh out"
            )
        if not pads_texts(model.program, model.pad_id):
            raise UnsupportedModelError(
                f"export: expected texts in padded batches, of which there are a few shapes, and those of {class_name} "
                "are not padded, so that each length has a program of its own; serve the model itself"
            )
        own = None if has_head else _own_embedder(loaded, runtime)
        if own is not None and (own.is_sparse or own.tokens is not None):
            raise UnsupportedModelError(
                f"export: expected a model with one dense embedding for a text, got {loaded.source.name}, which has "
                f"{'sparse ones' if own.is_sparse else 'one for each token'}; serve the model itself"
            )
        limits = [each for each in (options.max_model_len, (own or model).max_len) if each is not None]
        if not limits:
            raise InvalidArgumentError(
                f"max_model_len: expected the most tokens of a text, since nothing limits those of {class_name}, got "
                "none; pass it"
            )
        rows = min(MAX_ROWS, 1 << (options.max_num_seqs.bit_length() - 1))
        return cls(runtime, model, own, min(limits), rows)

    @property
    def pooling_weights(self) -> dict[str, Weight]:
        """Weights of the layers behind the model, by their names in the bundle."""
        layers = () if self.own is None else self.own.weights
        return {
            POOLING_WEIGHT.format(number, name): array
            for number, tensors in enumerate(layers)
            for name, array in tensors.items()
        }

    def described(self) -> dict[str, Any]:
        """Returns what the manifest says about texts."""
        model, own = self.model, self.own
        is_head = isinstance(model, TextHead)
        return {
            "class": model.program.class_name,
            "field": "logits" if is_head else "last_hidden_state",
            "arguments": batch_arguments(model.program, model.tokenizer.arguments),
            "vocab_size": model.program.vocab_size,
            "max_positions": model.program.max_positions,
            "pad_id": model.pad_id,
            "max_len": self.max_len,
            "max_rows": self.max_rows,
            "head": _described_head(model) if isinstance(model, TextHead) else None,
            "embedding": None
            if own is None
            else {
                "layers": [dataclasses.asdict(layer) for layer in own.layers],
                "weights": [sorted(tensors) for tensors in own.weights],
                "rule": dataclasses.asdict(own.rule),
            },
        }

    def tokenizer(self, loaded: LoadedModel) -> tuple[TokenizerRecord | None, dict[str, Any] | None]:
        """Returns the tokenizer, and what the manifest says about it; None if the model has none.

        Raises:
            UnsupportedModelError: `tokenizers` alone does not make the same rows of texts.
        """
        tokenizer = loaded.load_tokenizer()
        if tokenizer is None:
            return None, None
        is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
            getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in _METHODS
        )
        arguments = self.model.tokenizer.arguments
        if not is_plain or not arguments <= _ARGUMENTS:
            raise _other_tokenizer(type(tokenizer).__name__)
        special = {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        record = TokenizerRecord(tokenizer.backend_tokenizer.to_str(), None, None, special)
        described = {
            "special_tokens_map": special,
            "response_template": None,
            "special_ids": sorted(tokenizer.all_special_ids),
            "arguments": sorted(arguments),
        }
        for each in (self.model, self.own):
            if each is not None:
                lower_case = isinstance(each, Embedder) and each.rule.lower_case
                made = BundleTextEncoder(record, described, loaded.source.name, lower_case=lower_case)
                _check_equal(each.tokenizer, made, type(tokenizer).__name__)
        return record, described

    def export(self, target: ExportTarget, programs: ProgramWriter) -> dict[str, Any]:
        """Writes the programs for a platform; returns their part of the manifest.

        Raises:
            UnsupportedModelError: a forward reads the values of texts.
        """
        texts = self.model.program
        assert isinstance(texts, ModuleTexts)
        field = "logits" if isinstance(self.model, TextHead) else "last_hidden_state"
        step = texts.runtime.steps.forward
        limited = _Limited(texts, self.max_rows)
        names = batch_arguments(texts, self.model.tokenizer.arguments)
        written = {}
        with target.tracing(None) as sharding:
            for shape in batch_shapes(limited, self.max_len):
                arrays = dict.fromkeys(names, jax.ShapeDtypeStruct(shape, np.int32))
                key = program_key(TEXTS, (arrays,), None)
                function = functools.partial(_forward, step.function, field)
                try:
                    written[key] = programs.write(function, TEXTS, key, (arrays,), names, target, sharding)
                except TorchaxServeError:
                    raise
                except Exception as error:  # whatever model code raises for want of values
                    raise UnsupportedModelError(
                        f"export: expected a model whose code does not read the values of texts, got "
                        f"{texts.class_name} ({type(error).__name__}: {str(error).splitlines()[0][:200]}); serve the "
                        "model itself"
                    ) from error
        return {
            "platform": target.platform,
            "chip": target.chip,
            "uses_kernels": target.uses_kernels,
            "programs": written,
        }


class _Limited(ModuleTexts):
    """The same forwards, with batches of fewer rows."""

    def __init__(self, texts: ModuleTexts, max_rows: int) -> None:
        super().__init__(texts.runtime)
        self.max_rows = max_rows


def _forward(function: Any, field: str, weights: Mapping[str, Any], arrays: dict[str, jax.Array]) -> tuple[Any]:
    of_module = {name: weight for name, weight in weights.items() if not name.startswith(POOLING)}
    fields, _ = function(of_module, None, None, arrays, spec=CallSpec())
    if field not in fields:
        raise UnsupportedModelError(f"export: expected {field} of the model, got {', '.join(fields)}")
    return (fields[field],)


def _own_embedder(loaded: LoadedModel, runtime: ModelRuntime) -> Embedder | None:
    try:
        return own_embedder(loaded, runtime)
    except InvalidArgumentError:  # no files of sentence-transformers: requests say the pooling
        return None


def _described_head(head: TextHead) -> dict[str, Any]:
    return {
        "class_name": head.class_name,
        "labels": {str(index): label for index, label in head.labels.items()},
        "problem_type": head.problem_type,
        "pair_activation": head.pair_activation,
        "lack": head.lack,
    }


def _check_equal(theirs: TextEncoder, made: TextEncoder, class_name: str) -> None:
    """Raises UnsupportedModelError unless both make the same rows of some texts and pairs."""
    for text in filter(str.strip, PROBES):
        for pair in (None, PROBES[0]):
            for max_len in (None, 6):
                if theirs.rows_of(text, pair, max_len) != made.rows_of(text, pair, max_len):
                    raise _other_tokenizer(class_name)


def _other_tokenizer(class_name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"export: expected a fast tokenizer that does what its backend does, got {class_name}, which does more; serve "
        "the model itself"
    )
