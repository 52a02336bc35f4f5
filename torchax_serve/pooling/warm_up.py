"""Warm-up for texts: compiles the programs of embeddings, labels and scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from model_adapters.loading.progress import Progress
from torchax_serve.compilation.background import CompileTask, compile_all
from torchax_serve.pooling.batching import TOKENS_PER_BATCH, Batch, batch_arguments, batch_shapes, pads_texts, run
from torchax_serve.pooling.classification import TextHead
from torchax_serve.pooling.embedding import Embedder
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
    if not pads_texts(program, pad_id):
        return "its texts are not padded, so that each length has a program of its own"
    first = next(run(program, [{IDS: [pad_id or 0]}], model.tokenizer.arguments, pad_id=pad_id))
    tasks, num_programs = list(_tasks(model, embedders, *_places(first))), program.num_programs
    tasks[0].compile()  # the batch that has just run
    if program.num_programs > num_programs:
        return "its code reads the values of texts, so that each text has a program of its own"
    with progress.stage("compiling programs", len(tasks), "items") as advance:
        compile_all(tasks, advance, cancelled)
    return None


def _places(batch: Batch) -> tuple[Any, Any]:
    """Returns where results and arguments of a batch lie."""
    result = next(leaf for leaf in jax.tree.leaves(batch.fields) if isinstance(leaf, jax.Array))
    return result.sharding, batch.mask.sharding


def _tasks(
    model: TextHead | Embedder, embedders: tuple[Embedder, ...], of_results: Any, of_arguments: Any
) -> Iterator[CompileTask]:
    """Yields a task for each shape of a batch, placed as `of_results` and `of_arguments` say."""
    max_len = max(each.max_len or TOKENS_PER_BATCH for each in (model, *embedders))
    for shape in batch_shapes(model.program, max_len):
        array = jax.ShapeDtypeStruct(shape, np.int32, sharding=of_arguments)
        given = dict.fromkeys(batch_arguments(model.program, model.tokenizer.arguments), array)

        def further(fields: Any, mask: Any = array) -> Iterator[CompileTask]:
            for each in embedders:
                hidden = fields.get(each.field)
                if hidden is not None:
                    placed = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=of_results)
                    yield CompileTask("pool", functools.partial(each.compile_pooling, placed, mask))

        yield CompileTask(shape, functools.partial(model.program.compile, given)).then(further)
