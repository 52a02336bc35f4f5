"""Probes whether a prompt in chunks has the same logits as in one forward.

The engine cuts prompts into chunks, and computes a request that had to make room anew, answers and all, as if they were
its prompt. `generate` does neither, and there are models whose code takes it for granted: some continue a recurrence by
one token only, some give other logits with a cache than without. A short prompt shows it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from model_adapters.device_arrays import to_device
from model_adapters.errors import UnsupportedModelError
from torchax_serve.executors.per_sequence.executor import PerSequenceExecutor
from torchax_serve.executors.per_sequence.forward import PROBE_LEN
from torchax_serve.scheduler import PlanRow

FIRST_LEN = 4
TOLERANCE_FLOAT32 = 1e-3
TOLERANCE_HALF = 0.25
"""Mean difference of logits, in units of their standard deviation. Rounding stays far below; a token that a
model loses, or reads twice, makes a difference of the order of 1."""


def find_chunk_len(
    make: Callable[[int], PerSequenceExecutor],
    wanted: int,
    *,
    num_slots: int,
    vocab_size: int,
    is_float32: bool,
    is_one_by_one: bool = False,
) -> int:
    """Returns how many tokens of a prefill chunk one forward may compute: `wanted`, or 1.

    It writes to slot 0 and its pages.

    Args:
        make: Returns the executor with that many tokens in a forward, on an unused cache of `PROBE_LEN` tokens or more.
        wanted: Maximum number of tokens; more would make programs too large.
        num_slots: Number of slots of the executor.
        vocab_size: Number of columns of the logits.
        is_float32: Whether the model computes in float32; otherwise in 16 bits.
        is_one_by_one: Whether the model is known to need forwards of one token.

    Raises:
        UnsupportedModelError: with a cache, the model gives other logits than without.
    """
    trial = ChunkedPrefillProbe(num_slots, vocab_size, TOLERANCE_FLOAT32 if is_float32 else TOLERANCE_HALF)
    expected = trial.in_chunks(make(1 if is_one_by_one else max(wanted, PROBE_LEN)), PROBE_LEN)
    if not np.isfinite(expected).all():
        raise UnsupportedModelError("expected logits that are numbers for a trial prompt, got some that are not")
    if not trial.agrees(expected, trial.token_by_token(make(wanted))):
        raise UnsupportedModelError(
            "its logits for the last token of a prompt differ between one forward and steps on a cache, so a request "
            "would be answered differently after it had to make room for others"
        )
    for block_len in (wanted, 1):
        if trial.agrees(expected, trial.in_chunks(make(block_len), FIRST_LEN)):
            return block_len
    raise UnsupportedModelError("its logits for a prompt differ between one forward and chunks on a cache")


class ChunkedPrefillProbe:
    """Probe that prefills one random prompt in chunks of a given length.

    The result is compared with a single forward.
    """

    def __init__(self, num_slots: int, vocab_size: int, tolerance: float) -> None:
        self._num_slots, self._tolerance = num_slots, tolerance
        self._ids = np.random.default_rng(0).integers(1, vocab_size, PROBE_LEN).tolist()

    def in_chunks(self, model: PerSequenceExecutor, chunk_len: int) -> np.ndarray:
        """Logits [vocab] of the last token of the trial's prompt, computed in chunks."""
        for start in range(0, PROBE_LEN, chunk_len):
            logits = self._run(model, start, self._ids[start : start + chunk_len], is_decode=False)
        return np.asarray(logits[0])

    def token_by_token(self, model: PerSequenceExecutor) -> np.ndarray:
        """Returns the logits if all tokens but the first few are computed one by one."""
        logits = self._run(model, 0, self._ids[:FIRST_LEN], is_decode=False)
        for start in range(FIRST_LEN, PROBE_LEN):
            logits = self._run(model, start, self._ids[start : start + 1], is_decode=True)
        return np.asarray(logits[0])

    def _run(self, model: PerSequenceExecutor, start: int, ids: list[int], *, is_decode: bool) -> jax.Array:
        row = PlanRow(0, 0, start, len(ids), None if is_decode else tuple(ids), True)
        last_tokens = to_device(np.full(self._num_slots, ids[0]), np.int32)
        if model.sources is not None:
            model.sources.assign(0, model.sources.probe_input)
        return model.run([row], model.first_pages(), last_tokens)

    def agrees(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Returns whether logits are equal up to rounding."""
        return bool(np.abs(a - b).mean() <= self._tolerance * a.std())
