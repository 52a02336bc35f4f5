"""Conversations packed into rows of one fixed length, so that the training step is compiled once."""

from __future__ import annotations

import random
from dataclasses import dataclass

import jax
import numpy as np
from embedded_corpus import Corpus
from transformers import PreTrainedTokenizerFast

from embedded_training.tokenizer import turns_of

_MISFITS_PER_ROW = 6


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Packed rows; every field is ``int32[num_rows, row_len]``.

    `segment` numbers the conversations of a row from 1, with 0 for padding: a token sees its own segment alone.
    `position` starts anew in each segment. `learned` is 1 where the token is one that the model has to predict.
    """

    tokens: jax.Array | np.ndarray
    segment: jax.Array | np.ndarray
    position: jax.Array | np.ndarray
    learned: jax.Array | np.ndarray


def encode(tokenizer: PreTrainedTokenizerFast, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation's pieces, and for each 1 where it is to be learned."""
    tokens: list[int] = []
    learned: list[int] = []
    for text, is_learned in pieces:
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens += ids
        learned += [int(is_learned)] * len(ids)
    return tokens, learned


class Packer:
    """Fills batches from the corpus; the batch of a step depends on the seed and the step alone."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, num_rows: int, row_len: int, seed: int):
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._shape = (num_rows, row_len)
        self._seed = seed

    def batch(self, step: int) -> Batch:
        """The batch of training step `step`; a conversation that does not fit is left for shorter ones, a few times."""
        rng = random.Random(f"batch {self._seed} {step}")
        num_rows, row_len = self._shape
        tokens, segment, position, learned = (np.zeros(self._shape, np.int32) for _ in range(4))
        for row in range(num_rows):
            used, number, num_misfits = 0, 0, 0
            while num_misfits < _MISFITS_PER_ROW:
                ids, marks = encode(self._tokenizer, list(turns_of(self._corpus.draw(rng))))
                if used + len(ids) > row_len:
                    num_misfits += 1
                    continue
                number += 1
                here = slice(used, used + len(ids))
                tokens[row, here], learned[row, here] = ids, marks
                segment[row, here], position[row, here] = number, np.arange(len(ids))
                used += len(ids)
        return Batch(tokens, segment, position, learned)
