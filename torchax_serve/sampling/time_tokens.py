"""Rules of Whisper's time tokens, as rows of `SamplerHistory`.

They are those of transformers' ``WhisperTimeStampLogitsProcessor``, which are those of OpenAI's Whisper: times come in
pairs, do not fall, and are preferred where all of them together are likelier than any text token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from torchax_serve.sampling.types import SamplerHistory
from torchax_serve.sampling_params import TimeTokens


def time_columns(times: TimeTokens | None) -> dict[str, int]:
    """Returns the columns of `SamplerHistory.ints` of a row with time tokens; None: without."""
    return {
        "time_begin": 0 if times is None else times.begin,
        "time_eos": 0 if times is None else times.eos_id,
        "time_first_end": 0 if times is None or times.max_first is None else times.begin + times.max_first + 1,
        "time_by_sum": int(times is not None and times.by_sum),
    }


def enforce_time_tokens(history: SamplerHistory, num_new: jax.Array, scores: jax.Array) -> jax.Array:
    """Masks what may not follow in rows with time tokens.

    Args:
        history: Rows of the batch.
        num_new: int32[n], new tokens of each row so far.
        scores: float32[n, vocab].
    """
    if not history.tokens.shape[1]:
        return scores
    begin, eos_id, first_end = (history.column(name)[:, None] for name in ("time_begin", "time_eos", "time_first_end"))

    def enforced() -> jax.Array:
        column, num = jnp.arange(scores.shape[1]), num_new[:, None]
        prompt_len = history.column("prompt_len")[:, None]
        length, places = prompt_len + num, jnp.arange(history.tokens.shape[1])
        is_time = (history.tokens >= begin) & (places >= prompt_len) & (places < length)
        last, before = (_token_at(history, length - back) >= begin for back in (1, 2))
        last_is_time, before_is_time = (num >= 1) & last, (num < 2) | before
        newest_at = jnp.max(jnp.where(is_time, places, -1), axis=1, keepdims=True)
        # A time that opens a segment is later than the one before; one that closes it may be the same.
        least = _token_at(history, newest_at) + jnp.where(last_is_time & ~before_is_time, 0, 1)
        least = jnp.where(newest_at < 0, begin, least)
        masked = (column == begin - 1) | (column >= begin) & (column < least)
        masked |= last_is_time & before_is_time & (column >= begin)
        masked |= last_is_time & ~before_is_time & (column < eos_id)
        masked |= (num == 0) & ((column < begin) | (first_end > 0) & (column >= first_end))
        left = jnp.where(masked, -jnp.inf, scores)
        logprobs = jax.nn.log_softmax(left, axis=-1)
        of_times = jax.nn.logsumexp(jnp.where(column >= begin, logprobs, -jnp.inf), axis=-1)
        of_text = jnp.max(jnp.where(column < begin, logprobs, -jnp.inf), axis=-1)
        is_time_next = (history.column("time_by_sum") > 0) & (of_times > of_text)
        left = jnp.where(is_time_next[:, None] & (column < begin), -jnp.inf, left)
        return jnp.where(begin > 0, left, scores)

    return lax.cond((begin > 0).any(), enforced, lambda: scores)


def _token_at(history: SamplerHistory, place: jax.Array) -> jax.Array:
    """Returns the token at `place` int32[n, 1] of each row; the first for places before it."""
    return jnp.take_along_axis(history.tokens, jnp.maximum(place, 0), axis=1, mode="clip")
