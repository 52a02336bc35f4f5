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

_CARD = Path(__file__).parent / "card_template.md"


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
    num_global = (config.layer_types or []).count("full_attention")
    rows = [
        f"| {title} | {score.num_right} | {score.num_asked} | {score.accuracy:.1%} |"
        for title, score in measured.rows()
    ]
    text = _CARD.read_text(encoding="utf-8").format(
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
