"""The open requests with token masks, and the masks of a plan's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from torchax_serve.sampling.token_masks import ALL_TOKENS, TokenMasks, num_words
from torchax_serve.scheduler import RequestId, StepPlan
from torchax_serve.scheduler.request import RequestState


class MaskedRequests:
    """Token masks by request; used by the engine's thread only.

    Args:
        vocab_size: Number of columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = num_words(vocab_size)
        self._masks: dict[RequestId, TokenMasks] = {}

    def add(self, request_id: RequestId, masks: TokenMasks | None) -> None:
        """Adds a request; None for one without masks."""
        if masks is not None:
            self._masks[request_id] = masks

    def drop_done(self, find: Callable[[RequestId], RequestState | None]) -> None:
        """Drops the masks of requests of which every token may follow from now on.

        Args:
            find: Returns the state of a request that has not ended, which waits for its tokens no more.
        """
        for request_id in [each for each, masks in self._masks.items() if getattr(masks, "is_done", False)]:
            del self._masks[request_id]
            if (state := find(request_id)) is not None:
                state.waits_for_tokens = False

    def of(
        self, plan: StepPlan, find: Callable[[RequestId], RequestState | None], read_tokens: Callable[[], None]
    ) -> PlanMasks | None:
        """Returns the masks of a plan's rows; None if no row has one.

        Args:
            plan: The plan; it has one step if a row is masked.
            find: Returns the state of a request that has not ended.
            read_tokens: Reads the tokens of all steps in flight.
        """
        if not self._masks:
            return None
        self._masks = {request_id: masks for request_id, masks in self._masks.items() if find(request_id) is not None}
        masked: list[tuple[int, int, TokenMasks, RequestState]] = []
        for index, row in enumerate(plan.rows):
            masks, state = self._masks.get(row.request_id), find(row.request_id)
            if masks is not None and state is not None and row.samples_token:
                masked.append((index, row.slot, masks, state))
        return PlanMasks(self._num_words, masked, read_tokens) if masked else None


class PlanMasks:
    """Masks of the rows of one plan, not computed yet.

    Args:
        num_words: Words of a row.
        masked: Index, slot, masks and state of each masked row.
        read_tokens: Reads the tokens of all steps in flight.
    """

    def __init__(
        self,
        num_words: int,
        masked: Sequence[tuple[int, int, TokenMasks, RequestState]],
        read_tokens: Callable[[], None],
    ) -> None:
        self._num_words, self._masked, self._read_tokens = num_words, masked, read_tokens

    def words(self, num_rows: int, failures: dict[int, Exception]) -> np.ndarray:
        """Computes the masks, int32[num_rows, ceil(vocab / 32)].

        The device computes the logits of the plan meanwhile: it needs the tokens before, and not their values here.

        Args:
            num_rows: Rows of the logits; those behind the plan's have no masks.
            failures: Takes the errors of masks, by slot.

        Raises:
            Exception: A step in flight has failed.
        """
        self._read_tokens()
        words = np.full((num_rows, self._num_words), ALL_TOKENS)
        for index, slot, masks, state in self._masked:
            if state.finish_reason is not None:
                continue  # with a token that has just been read: the row's next one is not delivered
            try:
                masks.fill(words[index], state.output_ids)
            except Exception as error:  # of this request
                words[index] = ALL_TOKENS
                failures[slot] = error
        return words
