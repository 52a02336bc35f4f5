"""Which tokens the options of a request forbid next, on the host: to say why none is left."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from model_adapters.errors import NoTokenLeftError
from torchax_serve.request_params import RequestParams
from torchax_serve.sampling.token_masks import MASKS, TokenMasks, num_words


def check_tokens_left(
    params: RequestParams,
    masks: TokenMasks | None,
    tokens: Sequence[int],
    prompt_len: int,
    *,
    vocab_size: int,
    only_with_others: bool = False,
) -> None:
    """Does nothing if a token may follow.

    Args:
        params: Options of the request.
        masks: Its masks; None: none.
        tokens: Prompt and answer so far.
        prompt_len: Tokens of the prompt.
        vocab_size: Columns of the logits.
        only_with_others: Whether masks are computed only where other options forbid tokens, too.

    Raises:
        NoTokenLeftError: Options forbid all tokens together; with their names.
    """
    forbidden = forbidden_tokens(params, tokens, prompt_len, vocab_size)
    if masks is not None and (forbidden or not only_with_others):
        forbidden[getattr(masks, "option", MASKS)] = _masked(masks, tokens[prompt_len:], vocab_size)
    names = [name for name, each in forbidden.items() if each.any()]
    if not names or not _union(forbidden, names).all():
        return
    for name in list(names):  # those that are needed for it
        others = [other for other in names if other != name]
        if others and _union(forbidden, others).all():
            names = others
    raise NoTokenLeftError(names, len(tokens) - prompt_len)


def forbidden_tokens(
    params: RequestParams, tokens: Sequence[int], prompt_len: int, vocab_size: int
) -> dict[str, np.ndarray]:
    """Returns the tokens that may not follow, bool[vocab], by the option that forbids some."""
    num_new = len(tokens) - prompt_len
    ids: dict[str, list[int]] = {"suppress_tokens": list(params.suppressed)}
    if num_new == 0:
        ids["begin_suppress_tokens"] = list(params.forbidden_first)
    if num_new < params.num_forced_tokens(prompt_len):
        ids["min_new_tokens"] = list(params.stop_ids)
    bias = params.token_bias
    if bias is not None:
        ids["bad_words_ids"] = bias.banned.tolist()
        ids["sequence_bias"] = bias.ids[bias.added == -math.inf].tolist()
    if params.sequences or params.ngram_size:
        of_encoder = params.num_encoder_ngrams
        ids["encoder_no_repeat_ngram_size"] = _ends_of(params.sequences[:of_encoder], tokens)
        ids["bad_words_ids"] = ids.get("bad_words_ids", []) + _ends_of(params.sequences[of_encoder:], tokens)
        ids["no_repeat_ngram_size"] = _ends_of_ngrams(tokens, params.ngram_size)
    found = {name: _as_bits(forbidden, vocab_size) for name, forbidden in ids.items() if forbidden}
    if bias is not None and bias.allowed is not None:
        found["allowed_token_ids"] = ~_as_bits(bias.allowed.tolist(), vocab_size)
    return found


def _ends_of(sequences: Sequence[tuple[tuple[int, ...], float]], tokens: Sequence[int]) -> list[int]:
    """Returns the last tokens of forbidden sequences whose others end `tokens`."""
    endings = [words for words, added in sequences if added == -math.inf]
    return [words[-1] for words in endings if tuple(tokens[len(tokens) + 1 - len(words) :]) == words[:-1]]


def _ends_of_ngrams(tokens: Sequence[int], size: int) -> list[int]:
    """Returns the tokens that would repeat an n-gram of `size` tokens; none for a size of 0."""
    if not size:
        return []
    last = tuple(tokens[len(tokens) - size + 1 :])
    ends = range(size - 1, len(tokens))
    return [tokens[end] for end in ends if tuple(tokens[end - size + 1 : end]) == last]


def _masked(masks: TokenMasks, output_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    bitmask = np.full(num_words(vocab_size), -1, np.int32)
    masks.fill(bitmask, list(output_ids))
    return np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:vocab_size] == 0


def _as_bits(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros(vocab_size, bool)
    bits[[token_id for token_id in ids if token_id < vocab_size]] = True
    return bits


def _union(forbidden: dict[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    return np.logical_or.reduce([forbidden[name] for name in names])
