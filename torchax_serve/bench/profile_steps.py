"""Profiles of a model's steps on made-up prompts: ``torchax-serve profile``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError
from torchax_serve import EngineOptions, SamplingParams
from torchax_serve.entrypoints.serve import serve_without_pipelines
from torchax_serve.profiling import Profile, ProfileSession
from torchax_serve.validation.folders import writable_folder

SEED = 0
NUM_WARM_UPS = 2
"""Runs before the profile: while one of its programs compiles in the background, a larger one may stand in for it."""


def profile_steps(
    model: str | os.PathLike[str] | None,
    *,
    prompt_len: int,
    num_steps: int,
    rows: Sequence[int],
    folder: Path | None = None,
    **options: Any,
) -> dict[int, Profile]:
    """Returns a profile for each number of requests that run at once.

    Args:
        model: As of `torchax_serve.serve`.
        prompt_len: Tokens of each prompt, which are made up.
        num_steps: Tokens generated behind it; of an encoder, number of forwards.
        rows: Numbers of requests.
        folder: Where the traces are written, each in a folder of its own; None: they are not kept.
        options: Further arguments of `serve`.

    Raises:
        InvalidArgumentError: the model takes no text, or not as many tokens; nothing can be written to `folder`.
        TorchaxServeError: the model cannot be loaded.
    """
    if folder is not None:
        writable_folder("folder", folder)  # before the model is loaded
    engine = EngineOptions(max_num_seqs=max(rows), enable_prefix_caching=False)
    with contextlib.closing(serve_without_pipelines(model, engine=engine, **options)) as served:
        if served.transcribes:
            raise InvalidArgumentError(
                "model: expected one that takes text, got one that takes audio; profile calls of your own by "
                "model.profile() in Python"
            )
        work = (
            _Generation(served, prompt_len, num_steps)
            if served.writes_text
            else _Forwards(served, prompt_len, num_steps)
        )
        found = {}
        for num_rows in rows:
            session = served.profile(None if folder is None else folder / f"rows{num_rows}")
            found[num_rows] = _profiled(session, work, num_rows)
    first = found[rows[0]]
    for each in found.values():  # one measurement serves all
        each.bandwidth = first.bandwidth
    return found


def _profiled(session: ProfileSession, work: Any, num_rows: int) -> Profile:
    for cache in session.caches:  # what runs first has names already, and need not be compiled twice
        cache.names_modules = True
    for _ in range(NUM_WARM_UPS):
        work.run(num_rows)
        for cache in session.caches:
            if cache.background is not None:
                cache.background.wait()
    with session as profile:
        work.run(num_rows)
    return profile


def _prompts(model: Any, num_rows: int, prompt_len: int) -> np.ndarray:
    """Returns made-up prompts, int[num_rows, prompt_len], without special tokens."""
    size = model.config.get_text_config().vocab_size
    return np.random.default_rng(SEED).integers(size // 4, max(size // 2, size // 4 + 1), (num_rows, prompt_len))


class _Generation:
    """Greedy answers of a number of tokens."""

    def __init__(self, model: Any, prompt_len: int, num_steps: int) -> None:
        self._model, self._prompt_len = model, prompt_len
        self._params = SamplingParams(max_new_tokens=num_steps, ignore_eos=True, temperature=0)

    def run(self, num_rows: int) -> None:
        """Answers as many prompts at once."""
        prompts = _prompts(self._model, num_rows, self._prompt_len).tolist()
        for tokens in [self._model.iter_tokens(prompt, params=self._params) for prompt in prompts]:
            for _ in tokens:
                pass


class _Forwards:
    """Forwards of an encoder."""

    def __init__(self, model: Any, prompt_len: int, num_steps: int) -> None:
        self._model, self._prompt_len, self._num_steps = model, prompt_len, num_steps

    def run(self, num_rows: int) -> None:
        """Runs a batch of as many texts, `num_steps` times."""
        ids = torch.tensor(_prompts(self._model, num_rows, self._prompt_len))
        for _ in range(self._num_steps):
            self._model(input_ids=ids, attention_mask=torch.ones_like(ids))
