"""Accuracy on held-out questions, by plain transformers: eager PyTorch, greedy, exact match of the whole answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from embedded_corpus import Exchange
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Score:
    """How many of a task's questions were answered right, and the first ones that were not."""

    num_right: int
    num_asked: int
    mistakes: tuple[tuple[str, str, str], ...]  # prompt, expected, got

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.num_right / self.num_asked


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], batch_size: int = 64
) -> list[str]:
    """The model's greedy answers to single-turn prompts, in order."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # little padding in a batch
    found = [""] * len(prompts)
    generate: Any = model.generate
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        inputs: Any = tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompts[index]}] for index in chosen],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            padding=True,
        )
        with torch.no_grad():
            output = generate(**inputs)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, text in zip(chosen, texts, strict=True):
            found[index] = text
    return found


def scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, groups: Mapping[str, list[Exchange]]
) -> dict[str, Score]:
    """Asks every question of every task of `groups` and compares the answers letter by letter."""
    prompts = [exchange.prompt for group in groups.values() for exchange in group]
    given = iter(answers(model, tokenizer, prompts))
    found = {}
    for task, group in groups.items():
        asked = [(exchange, next(given)) for exchange in group]
        wrong = [(exchange.prompt, exchange.answer, got) for exchange, got in asked if got != exchange.answer]
        found[task] = Score(len(group) - len(wrong), len(group), tuple(wrong[:10]))
    return found
