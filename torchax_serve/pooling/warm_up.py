"""Warm-up of a model's texts: compiles the programs that embeddings, labels and scores of any texts can need."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading import LoadedModel
from model_adapters.loading.progress import Progress
from model_adapters.program.model_program import CallSpec
from torchax_serve.compilation.background import CompileTask, compile_all
from torchax_serve.pooling.batching import (
    TOKENS_PER_BATCH,
    Batch,
    batch_arguments,
    batch_shapes,
    limit_of,
    pads_texts,
    run,
)
from torchax_serve.pooling.classification import pad_id_of_head, tokenizer_of
from torchax_serve.pooling.embedding import Embedder, any_embedder, own_embedder, pad_id_of
from torchax_serve.pooling.text_tokenizer import IDS
from torchax_serve.runtime.model_runtime import ModelRuntime

HIDDEN = "last_hidden_state"


class _Texts(NamedTuple):
    """How a model's texts are computed, for one kind of result.

    Attributes:
        part: Submodule that is called.
        names: Arguments that the tokenizer makes.
        pad_id: Padding token; None where texts are not padded.
        max_len: Most tokens of a text that programs are compiled for.
        embedders: What follows the forward.
    """

    part: ModelRuntime
    names: Iterable[str]
    pad_id: int | None
    max_len: int
    embedders: tuple[Embedder, ...] = ()


def warm_up(
    loaded: LoadedModel,
    runtime: ModelRuntime,
    progress: Progress,
    cancelled: Callable[[], str | None] = lambda: None,
) -> str | None:
    """Compiles the programs of all batches of texts.

    Args:
        loaded: The model.
        runtime: Of the complete model.
        progress: Shows the number of programs.
        cancelled: Returns the reason to stop, if there is one.

    Returns:
        Why programs will still be compiled at their first use; None if all are there.

    Raises:
        TorchaxServeError: it was cancelled, or a program cannot be compiled.
    """
    texts = _texts(loaded, runtime)
    if not pads_texts(texts.part, texts.pad_id):
        return "its texts are not padded, so that each length has a program of its own"
    first = next(run(texts.part, [{IDS: [texts.pad_id or 0]}], texts.names, pad_id=texts.pad_id))
    tasks, num_programs = list(_tasks(texts, *_places(first))), texts.part.steps.forward.num_programs
    tasks[0].compile()  # the batch that has just run
    if texts.part.steps.forward.num_programs > num_programs:
        return "its code reads the values of texts, so that each text has a program of its own"
    with progress.stage("compiling programs", len(tasks), "items") as advance:
        compile_all(tasks, advance, cancelled)
    return None


def _places(batch: Batch) -> tuple[Any, Any]:
    """Returns where results and arguments of a batch lie."""
    result = next(leaf for leaf in jax.tree.leaves(batch.fields) if isinstance(leaf, jax.Array))
    return result.sharding, batch.mask.sharding


def _texts(loaded: LoadedModel, runtime: ModelRuntime) -> _Texts:
    class_name = type(runtime.program.module).__name__
    if class_name.endswith(("ForSequenceClassification", "ForTokenClassification")):
        is_head = class_name.endswith("ForSequenceClassification")
        pad_id = pad_id_of_head(loaded, runtime) if is_head else pad_id_of(loaded, runtime)
        limit = limit_of(loaded, runtime)
        return _Texts(runtime, tokenizer_of(loaded).arguments, pad_id, limit or TOKENS_PER_BATCH)
    found = any_embedder(loaded, runtime)
    embedders = [found]
    with contextlib.suppress(InvalidArgumentError):  # without files of sentence-transformers requests say the pooling
        embedders.insert(0, own_embedder(loaded, runtime))
    limit = max(each.max_len or TOKENS_PER_BATCH for each in embedders)
    return _Texts(found.part, found.tokenizer.arguments, found.pad_id, limit, tuple(embedders))


def _tasks(texts: _Texts, of_results: Any, of_arguments: Any) -> Iterator[CompileTask]:
    """Yields a task for each shape of a batch; arrays lie where `of_results` and `of_arguments` say."""
    step = texts.part.steps.forward
    for shape in batch_shapes(texts.part, texts.max_len):
        array = jax.ShapeDtypeStruct(shape, np.int32, sharding=of_arguments)
        given = dict.fromkeys(batch_arguments(texts.part, texts.names), array)

        def compile(given: dict[str, Any] = given) -> Any:
            return step.compiled(texts.part.weights, None, None, given, spec=CallSpec())

        def further(program: Any, mask: Any = array) -> Iterator[CompileTask]:
            hidden = program.out_info[0].get(HIDDEN)
            if hidden is not None:
                placed = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=of_results)
                for each in texts.embedders:
                    yield CompileTask("pool", functools.partial(each.compile_pooling, placed, mask))

        yield CompileTask(shape, compile).then(further)
