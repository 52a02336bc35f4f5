"""``torchax-serve train``: fine-tunes a model on conversations."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.errors import EXIT_INTERRUPTED
from torchax_serve.cli.shared.load_options import ConfigOptions, check_choice, option_groups
from torchax_serve.cli.shared.model_name import check_model, complete_model
from torchax_serve.cli.shared.terminal import passing_note, print_note
from torchax_serve.validation.extras import require_matplotlib, require_package

if TYPE_CHECKING:
    from torchax_serve.training.trainer import StepReport

SCHEDULES = ("constant", "linear", "cosine")
DTYPES = ("auto", "float32", "bfloat16")
_option = typer.Option


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of the steps, each a field of `TrainingOptions`."""

    num_steps: Annotated[int, _option("--steps", min=1, help="Optimizer steps.")] = 200
    batch_size: Annotated[int, _option("--batch-size", min=1, help="Rows of a step.")] = 8
    seq_len: Annotated[int, _option("--seq-len", min=2, help="Tokens of a row.")] = 512
    num_micro_batches: Annotated[
        int, _option("--accumulate", min=1, help="Parts of a batch whose gradients are summed, to save memory.")
    ] = 1
    learning_rate: Annotated[float, _option("--lr", help="Highest learning rate of AdamW.")] = 2e-4
    warmup_steps: Annotated[int, _option("--warmup", min=0, help="Steps in which it rises from 0.")] = 0
    schedule: Annotated[str, _option("--schedule", help="Afterwards it is constant, linear or cosine.")] = "constant"
    weight_decay: Annotated[float, _option("--weight-decay", help="Weight decay of matrices.")] = 0.0
    max_grad_norm: Annotated[float, _option("--max-grad-norm", help="Longer gradients are cut; 0: never.")] = 1.0
    packing: Annotated[bool, _option("--packing/--no-packing", help="Several rows of the data in one of a batch.")] = (
        True
    )
    answers: Annotated[str, _option("--answers", help="Answers that are learned: all, or the last of each row.")] = (
        "all"
    )
    remat: Annotated[
        bool, _option("--remat", help="Compute activations of layers again in the backward pass, to save memory.")
    ] = False
    seed: Annotated[int, _option("--seed", min=0, help="Seed of the order of the data and of new weights.")] = 0
    save_every: Annotated[int, _option("--save-every", min=1, help="Steps between two checkpoints.")] = 100

    def __post_init__(self) -> None:
        check_choice("--schedule", self.schedule, SCHEDULES)
        check_choice("--answers", self.answers, ("all", "last"))


@option_groups
def train(
    model: Annotated[str, typer.Argument(help="Short name, hub id or folder.", autocompletion=complete_model)],
    *,
    data: Annotated[Path, typer.Option("--data", help='JSONL: {"messages": [...]} or {"text": "..."} on each line.')],
    out: Annotated[Path, typer.Option("--out", help="Folder of the result, of checkpoints and losses.")],
    lora: Annotated[
        str | None,
        typer.Option("--lora", help="Train an adapter, such as r=16,alpha=32; else all weights."),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="Devices, such as fsdp=4,model=2; one device without it.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Picture of the loss curve, such as losses.png.")] = None,
    step: StepOptions,
    load: ConfigOptions,
) -> None:
    """Fine-tune a model on conversations; write an adapter for peft, or a model.

    A run that was ended goes on when the same command is given again.

    torchax-serve train qwen3-0.6b --data chats.jsonl --lora r=16,alpha=32 --out ./adapter
    """
    check_model(model, load.revision)
    check_choice("--dtype", load.dtype, DTYPES)
    if load.trust_remote_code:
        raise InvalidArgumentError("--trust-remote-code: expected a model of transformers' own to train; leave it out")
    if not data.is_file():
        raise InvalidArgumentError(f"--data: expected a JSONL file, got {data}; correct the path")
    for module in ("optax", "orbax", *(["peft"] if lora else [])):
        require_package(module, "train", extra="train")
    if plot is not None:
        require_matplotlib("--plot")
        from torchax_serve.profiling.picture import check_plot

        check_plot(plot)
    with passing_note("starting torch and jax ..."):
        from torchax_serve.training.options import TrainingOptions
        from torchax_serve.training.trainer import train as run

    values: dict[str, Any] = dataclasses.asdict(step)
    values |= {"max_grad_norm": step.max_grad_norm or None, "dtype": load.dtype, "mesh": _mesh(mesh)}
    options = TrainingOptions(**values)
    loading = {name: value for name, value in load.kwargs().items() if name not in ("dtype", "trust_remote_code")}
    with _stop_on_interrupt() as stop:
        result = run(model, data, out=out, options=options, lora=lora, report=_report, stop=stop, **loading)
    if plot is not None:
        result.plot(plot)
    if not result.is_complete:
        print_note(f"stopped after {len(result.losses)} steps; the same command goes on")
        raise typer.Exit(EXIT_INTERRUPTED)
    print(f"{out}: {'adapter' if lora else 'model'} after {len(result.losses)} steps, loss {result.losses[-1]:.4f}")


def _mesh(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    found = {}
    for part in text.split(","):
        axis, _, number = (each.strip() for each in part.partition("="))
        if not number.isdigit():
            raise InvalidArgumentError(f"--mesh: expected AXIS=NUMBER such as fsdp=4, got {part.strip()!r}; correct it")
        found[axis] = int(number)
    return found


def _report(report: StepReport) -> None:
    rate = report.num_tokens / report.step_s
    print_note(
        f"step {report.step}/{report.num_steps}  loss {report.loss:.4f}  gradient {report.grad_norm:.3g}  "
        f"{rate:.0f} tokens/s"
    )


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed; a second one interrupts at once."""
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)
        print("stopping after this step; Ctrl-C again to stop at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


COMMAND = Command(
    "train",
    train,
    position=56,
    examples=(("train qwen3-0.6b --data chats.jsonl --lora r=16 --out ./adapter", "fine-tune it"),),
)
