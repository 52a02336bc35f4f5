"""Warm-up for texts: compiles the programs of embeddings, labels and scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.loading.progress import Progress
from torchax_serve.compilation.background import CompileTask, compile_all
from torchax_serve.pooling.batching import TOKENS_PER_BATCH, Batch, batch_arguments, batch_shapes, pads_texts, run
from torchax_serve.pooling.classification import TextHead
from torchax_serve.pooling.embedding import Embedder
from torchax_serve.pooling.layers import TokenRows
from torchax_serve.pooling.packing import abstract_tokens, num_texts, packed_arguments, packed_sizes
from torchax_serve.pooling.text_tokenizer import IDS


def warm_up(
    model: TextHead | Embedder,
    embedders: tuple[Embedder, ...],
    progress: Progress,
    cancelled: Callable[[], str | None] = lambda: None,
) -> str | None:
    """Compiles the programs of all batches of texts.

    Args:
        model: Its forwards are compiled.
        embedders: What follows its forward.
        progress: Shows the number of programs.
        cancelled: Returns the reason to stop, if there is one.

    Returns:
        Why programs will still be compiled at their first use; None if all are there.

    Raises:
        TorchaxServeError: it was cancelled, or a program cannot be compiled.
    """
    program, pad_id = model.program, model.pad_id
    row = {IDS: [pad_id or 0]}
    if isinstance(model, Embedder) and model.packs:
        tasks = list(_packed_tasks(model, embedders, next(model.batches([row]))))
    elif not pads_texts(program, pad_id):
        return "its texts are not padded, so that each length has a program of its own"
    else:
        first, num_programs = next(run(program, [row], model.tokenizer.arguments, pad_id=pad_id)), program.num_programs
        tasks = list(_padded_tasks(model, embedders, first))
        tasks[0].compile()  # the batch that has just run
        if program.num_programs > num_programs:
            return "its code reads the values of texts, so that each text has a program of its own"
    try:
        with progress.stage("compiling programs", len(tasks), "items") as advance:
            compile_all(tasks, advance, cancelled)
    except NotPackableError:  # of a row longer than those before: its texts are padded from now on
        return warm_up(model, embedders, progress, cancelled)
    return None


def _max_len(model: TextHead | Embedder, embedders: tuple[Embedder, ...]) -> int:
    return max(each.max_len or TOKENS_PER_BATCH for each in (model, *embedders))


def _padded_tasks(model: TextHead | Embedder, embedders: tuple[Embedder, ...], first: Batch) -> Iterator[CompileTask]:
    """Yields a task for each shape of a padded batch, placed as a `first` one."""
    of_results, of_arguments = _places(first)
    for rows, length in batch_shapes(model.program, _max_len(model, embedders)):
        array = jax.ShapeDtypeStruct((rows, length), np.int32, sharding=of_arguments)
        given = dict.fromkeys(batch_arguments(model.program, model.tokenizer.arguments), array)
        token = jax.ShapeDtypeStruct((rows * length,), np.int32, sharding=of_arguments)
        further = functools.partial(_poolings, embedders, TokenRows(token, token, rows), of_results)
        yield CompileTask((rows, length), functools.partial(model.program.compile, given)).then(further)


def _packed_tasks(model: Embedder, embedders: tuple[Embedder, ...], first: Batch) -> Iterator[CompileTask]:
    """Yields a task for each size of a row of texts, placed as a `first` one."""
    of_results, of_arguments = _places(first)
    for size in packed_sizes(_max_len(model, embedders)):
        array = jax.ShapeDtypeStruct((size,), np.int32, sharding=of_arguments)
        given = dict.fromkeys(packed_arguments(model.program, model.tokenizer.arguments), array)
        ends = jax.ShapeDtypeStruct((num_texts(size) + 1,), np.int32, sharding=of_arguments)
        further = functools.partial(_poolings, embedders, abstract_tokens(size, of_arguments), of_results)
        yield CompileTask(size, functools.partial(model.program.compile_packed, given, ends)).then(further)


def _poolings(embedders: tuple[Embedder, ...], tokens: TokenRows, place: Any, fields: Any) -> Iterator[CompileTask]:
    """Yields a task for what follows a forward that returns `fields`."""
    for each in embedders:
        hidden = fields.get(each.field)
        if hidden is not None:
            placed = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=place)
            yield CompileTask("pool", functools.partial(each.compile_pooling, placed, tokens))


def _places(batch: Batch) -> tuple[Any, Any]:
    """Returns where results and arguments of a batch lie."""
    result = next(leaf for leaf in jax.tree.leaves(batch.fields) if isinstance(leaf, jax.Array))
    return result.sharding, batch.tokens.rows.sharding
