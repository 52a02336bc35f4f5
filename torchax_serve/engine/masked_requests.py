"""The open requests with token masks, and the masks of a plan's rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchax_serve.sampling.token_masks import ALL_TOKENS, TokenMasks
from torchax_serve.scheduler import RequestId, StepPlan
from torchax_serve.scheduler.request import RequestState


class MaskedRequests:
    """Token masks by request; used by the engine's thread only.

    Args:
        vocab_size: Number of columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._masks: dict[RequestId, TokenMasks] = {}

    def add(self, request_id: RequestId, masks: TokenMasks | None) -> None:
        """Adds a request; None for one without masks."""
        if masks is not None:
            self._masks[request_id] = masks

    def words(
        self, plan: StepPlan, find: Callable[[RequestId], RequestState | None], failures: dict[int, Exception]
    ) -> np.ndarray | None:
        """Returns the masks of a plan's rows, int32[num_rows, ceil(vocab / 32)].

        None if no row has one.

        Args:
            plan: The plan; it has one step if a row is masked.
            find: Returns the state of a request that has not ended.
            failures: Takes the errors of masks, by slot.
        """
        if not self._masks:
            return None
        self._masks = {request_id: masks for request_id, masks in self._masks.items() if find(request_id) is not None}
        words: np.ndarray | None = None
        for index, row in enumerate(plan.rows):
            masks, state = self._masks.get(row.request_id), find(row.request_id)
            if masks is None or state is None or not row.samples_token:
                continue
            if words is None:
                words = np.full((len(plan.rows), self._num_words), ALL_TOKENS)
            try:
                masks.fill(words[index], state.output_ids)
            except Exception as error:  # of this request
                words[index] = ALL_TOKENS
                failures[row.slot] = error
        return words
