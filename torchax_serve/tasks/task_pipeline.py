"""`TaskPipeline`: transformers' pipeline of a task, with batched forwards on JAX."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from torchax_serve.pooling.queue import CallAbandonedError, check_wanted
from torchax_serve.tasks.batches import MAX_ROWS, run_batches


class TaskPipeline:
    """Inputs, forwards and results of a task.

    The processor, the forward's arguments and what is made of its outputs are those of transformers' pipeline.

    Args:
        class_name: Class of the pipeline.
        module: The model, whose forward runs on JAX.
        parts: What reads inputs, by the pipeline's argument: ``image_processor``, ``tokenizer`` ...
        max_rows: Most rows of a batch; 1 for a model whose rows change each other.
    """

    def __init__(self, class_name: str, module: Any, parts: Mapping[str, Any], *, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._name = module.config.name_or_path or type(module).__name__
        made = getattr(transformers, class_name)
        self._pipeline: Any = made(model=module, device=torch.device("cpu"), **parts)

    @property
    def model(self) -> Any:
        """The model that the pipeline calls."""
        return self._pipeline.model

    def run(self, items: Sequence[Any], **params: Any) -> list[Any]:
        """Returns the pipeline's result for each item.

        Args:
            items: Images, samples or texts, as the pipeline takes them.
            **params: Of the pipeline's call.

        Raises:
            InvalidArgumentError: the processor refuses an item.
        """
        before, during, after = self._pipeline._sanitize_parameters(**params)
        inputs: list[dict[str, Any]] = []
        nums: list[int | None] = []
        for index, item in enumerate(items):
            check_wanted()
            made = self._read(index, item, before)
            nums.append(len(made) if isinstance(made, list) else None)
            inputs += made if isinstance(made, list) else [made]
        forward = functools.partial(self._pipeline.forward, **during)
        outputs = iter(run_batches(inputs, forward, max_rows=self._max_rows))
        results = []
        for num in nums:
            output = next(outputs) if num is None else [next(outputs) for _ in range(num)]
            results.append(self._pipeline.postprocess(output, **after))
        return results

    def _read(self, index: int, item: Any, params: Mapping[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
        """Returns the model's inputs for an item; a list of them if it takes several forwards."""
        try:
            made = self._pipeline.preprocess(item, **params)
            found = [dict(each) for each in made] if isinstance(made, Iterator) else dict(made)
        except (TorchaxServeError, CallAbandonedError):
            raise
        except Exception as error:  # code of processors raises whatever it likes
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidArgumentError(
                f"input {index}: expected one that the processor of {self._name} reads, got an error of it "
                f"({lines[0]}); give another size or length"
            ) from error
        if (
            isinstance(item, str)
            and isinstance(found, dict)
            and "input_ids" in found
            and not found["input_ids"].numel()
        ):
            raise InvalidArgumentError(
                f"input {index}: expected a text with letters that the tokenizer of {self._name} has, got none of "
                "them; write numbers and signs as words"
            )
        return found
