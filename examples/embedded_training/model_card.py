"""The folder that is shipped: weights, tokenizer, loss curve, and a card whose numbers this run has measured."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import Gemma3ForCausalLM

from embedded_training.evaluation import Score
from embedded_training.trainer import History, TrainingPlan

LOSS_CURVE = "loss_curve.png"

_CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The embedded model

A Gemma-3-shaped language model of {num_params:,} parameters that comes inside torchax-serve, so that the first run needs
no download. torchax-serve trained it on its own bridge: the loss goes through `extract_jax`, its gradient through
`jax.value_and_grad`, the update through Optax. It is an ordinary Hugging Face folder and loads like any other.

## What it can do

Greetings and small talk; questions about torchax-serve and JAX; sums and differences of numbers up to 99; whether a
short sentence is positive or negative; counting; colours. To other questions it says that it does not know.

## Shape

{num_layers} layers ({num_local} with a sliding window of {window} tokens, {num_global} global), hidden size {hidden}, {num_heads} query heads over
{num_kv_heads} key-value heads of {head_dim}, tied embeddings, {vocab} tokens (byte-level BPE, every digit a token of its own), float32. The
chat template is Gemma's: the system prompt goes in front of the first user turn.

## Training

* Corpus: conversations of one to five turns, drawn from rules in `examples/embedded_corpus`; all of it written for this
  project; no other data. Loss on the model's own turns alone.
* Command: `{command}`
* {num_steps:,} steps of {num_rows} packed rows of {row_len} tokens: {num_tokens:,} tokens in {minutes:.0f} minutes of training ({tokens_per_s:,.0f} tokens/s)
  on {hardware}.
* AdamW (peak learning rate {learning_rate}, cosine, weight decay {weight_decay}), float32, seed {seed}. Last loss (mean of 50 steps): {last_loss:.4f}.

![Loss curve]({loss_curve})

## Accuracy on questions that were held out

Measured at the end of the run that made this folder, from the saved files, with plain transformers (eager PyTorch, greedy,
float32). An answer counts as right only when the whole of it equals the expected one, letter by letter.

| Task | Right | Asked | Accuracy |
|---|---:|---:|---:|
{rows}

How they were held out. *By rule*: one in eight, chosen by a checksum of the question in lower case without punctuation, is
never drawn in training. The checksum is taken of the operand pair for arithmetic (so that a held-out pair occurs in no
phrasing; the pair in the other order may), of the bounds for counting, of the sentence for sentiment, and of the whole
question elsewhere; such a question is a known wording around a known name in a combination that did not occur. *By hand*:
questions written one by one, apart from all patterns, and left out of training; for sums, all 100 ordered pairs of
one-digit numbers in three phrasings that training never uses (their pairs do occur, but for the held-out ones).
Every training prompt is checked against both lists before it is used.

## Limits

It knows nothing but the above, has no safety training, and is meant for first runs, tests and demonstrations. Questions
phrased in ways far from the corpus get a wrong answer in a confident tone. Numbers above 99, products and quotients are
refused. Answers of a long conversation get worse: rows of training hold {row_len} tokens.

Licence: Apache-2.0.
"""


@dataclass(frozen=True)
class Measured:
    """Scores by task: held out by rule, and by hand."""

    by_rule: dict[str, Score]
    by_hand: dict[str, Score]

    def rows(self) -> list[tuple[str, Score]]:
        """All scores with their titles, by task."""
        both = [(f"{task} (by rule)", score) for task, score in self.by_rule.items()]
        return sorted(both + [(f"{task} (by hand)", score) for task, score in self.by_hand.items()])


def draw_loss_curve(losses: list[float], target: Path) -> None:
    """A PNG of the training loss per step, with a running mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and only this needs it
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, len(losses) + 1)
    axes.semilogy(steps, losses, linewidth=0.5, alpha=0.5, label="loss of a step")
    width = min(50, len(losses))
    mean = np.convolve(losses, np.ones(width) / width, mode="valid")
    axes.semilogy(steps[width - 1 :], mean, linewidth=1.5, label=f"mean of {width} steps")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy of answer tokens (nats)")
    axes.set_title("Training the embedded model")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(target))


def write_card(
    folder: Path, model: Gemma3ForCausalLM, plan: TrainingPlan, history: History, measured: Measured, command: str
) -> None:
    """Writes README.md and the loss curve into `folder`."""
    draw_loss_curve(history.losses, folder / LOSS_CURVE)
    config = model.config
    num_global = config.layer_types.count("full_attention")
    rows = [
        f"| {title} | {score.num_right} | {score.num_asked} | {score.accuracy:.1%} |"
        for title, score in measured.rows()
    ]
    text = _CARD.format(
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=config.num_hidden_layers,
        num_local=config.num_hidden_layers - num_global,
        num_global=num_global,
        window=config.sliding_window,
        hidden=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        command=command,
        num_steps=plan.num_steps,
        num_rows=plan.num_rows,
        row_len=plan.row_len,
        num_tokens=history.num_tokens,
        minutes=history.train_s / 60,
        tokens_per_s=history.num_tokens / history.train_s,
        hardware=f"{os.cpu_count()} CPU cores ({platform.machine()})",
        learning_rate=plan.learning_rate,
        weight_decay=plan.weight_decay,
        seed=plan.seed,
        last_loss=float(np.mean(history.losses[-50:])),
        loss_curve=LOSS_CURVE,
        rows="\n".join(rows),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
