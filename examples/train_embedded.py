"""Trains the embedded model on this project's own bridge and writes it as an ordinary Hugging Face folder.

    python examples/train_embedded.py --output my-model

The state is saved in --workdir after every 100 steps and on Ctrl-C; the same command goes on from there. On Linux,

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000

keeps the memory of a step from being given back and asked for again, about a quarter of the CPU time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from embedded_corpus import Corpus, hand_written_held_out
from embedded_training.evaluation import scores
from embedded_training.model import embedded_config, fresh_model, generation_config, load_params, params_and_loss
from embedded_training.model_card import Measured, write_card
from embedded_training.packing import Packer
from embedded_training.tokenizer import train_tokenizer
from embedded_training.trainer import Trainer, TrainingPlan
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from model_adapters.errors import TorchaxServeError

CONSOLE = Console(stderr=True)


def train(trainer: Trainer, packer: Packer) -> bool:
    """Runs the training under a progress bar; returns whether it came to its end."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}, {task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=CONSOLE) as progress:
        task = progress.add_task(
            "training", total=trainer.plan.num_steps, completed=trainer.step, loss=float("nan"), speed=0.0
        )

        def report(step: int, loss: float, num_tokens: int, step_s: float) -> None:
            progress.update(task, completed=step, loss=loss, speed=num_tokens / step_s)
            if not CONSOLE.is_terminal and step % 50 == 0:  # a log file shows no bar
                CONSOLE.print(f"step {step} loss {loss:.4f} {num_tokens / step_s:,.0f} tokens/s")

        return trainer.run(packer.batch, report)


def save(output: Path, trainer: Trainer, tokenizer: PreTrainedTokenizerFast, model_overrides: dict[str, int]) -> None:
    """Writes weights, configuration and tokenizer."""
    model = fresh_model(embedded_config(tokenizer, **model_overrides), trainer.plan.seed)
    load_params(model, trainer.params)
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)  # safetensors makes it private; a package is read by everyone
    tokenizer.save_pretrained(output)


def evaluate(output: Path, corpus: Corpus, num_per_task: int) -> Measured:
    """Scores the saved folder on the held-out questions, printing each score and a few mistakes."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output).eval(), AutoTokenizer.from_pretrained(output)
    by_hand = {task: group[:num_per_task] for task, group in hand_written_held_out().items()}
    by_rule = corpus.held_out(num_per_task)
    measured = Measured(scores(model, tokenizer, by_rule), scores(model, tokenizer, by_hand))
    for title, result in measured.rows():
        CONSOLE.print(f"{title:36} {result.num_right:4} of {result.num_asked:4}  {result.accuracy:6.1%}")
        for prompt, expected, got in result.mistakes[:3]:
            CONSOLE.print(f"    asked {prompt!r}, expected {expected!r}, got {got!r}", markup=False, soft_wrap=True)
    return measured


def main(
    output: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    workdir: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = Path("embedded-training"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 3000,
    rows: Annotated[int, typer.Option(min=1, help="Packed rows per step.")] = 16,
    row_len: Annotated[int, typer.Option(min=128, help="Tokens per row.")] = 160,
    learning_rate: Annotated[float, typer.Option(min=1e-6, help="Peak learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Seed of weights, tokenizer and batches.")] = 0,
    vocab_size: Annotated[int, typer.Option(min=300, help="Tokens of the tokenizer.")] = 1536,
    hidden_size: Annotated[int, typer.Option(min=16, help="Width of the model.")] = 192,
    intermediate_size: Annotated[int, typer.Option(min=16, help="Width of the feed-forward layers.")] = 320,
    tokenizer_conversations: Annotated[
        int, typer.Option(min=100, help="Conversations the tokenizer learns from.")
    ] = 20000,
    num_layers: Annotated[int, typer.Option(min=3, help="Layers; every third sees all, the others a window.")] = 6,
    eval_per_task: Annotated[int, typer.Option(min=1, help="Held-out questions per task.")] = 200,
) -> None:
    """Trains the embedded model, evaluates it, and writes the model folder with its card."""
    corpus = Corpus()
    tokenizer = train_tokenizer(corpus, vocab_size, tokenizer_conversations, seed)
    overrides = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": num_layers}
    plan = TrainingPlan(steps, rows, row_len, learning_rate, seed=seed)
    model = fresh_model(embedded_config(tokenizer, **overrides), seed)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    CONSOLE.print(f"{num_params:,} parameters, {len(tokenizer)} tokens, {steps} steps of {rows} x {row_len} tokens")
    trainer = Trainer(plan, *params_and_loss(model), workdir)
    if trainer.step:
        CONSOLE.print(f"going on after step {trainer.step} of {workdir}")
    if not train(trainer, Packer(corpus, tokenizer, rows, row_len, seed)):
        CONSOLE.print(f"stopped after step {trainer.step}; the same command goes on from there")
        raise typer.Exit(130)
    save(output, trainer, tokenizer, overrides)
    measured = evaluate(output, corpus, eval_per_task)
    command = " ".join(["python", "examples/train_embedded.py", *sys.argv[1:]])
    write_card(output, model, plan, trainer.history, measured, command)
    CONSOLE.print(f"wrote {output}")


if __name__ == "__main__":
    try:
        typer.run(main)
    except TorchaxServeError as error:
        CONSOLE.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)
