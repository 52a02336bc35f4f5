"""``torchax-serve quantize``: writes a folder with quantized weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_model import end_if_explained
from torchax_serve.cli.shared.load_options import LoadOptions, option_groups
from torchax_serve.cli.shared.model_name import check_model, complete_model
from torchax_serve.cli.shared.terminal import may_style, passing_note


@option_groups
def quantize(
    model: Annotated[str, typer.Argument(help="Short name, hub id or folder.", autocompletion=complete_model)],
    out: Annotated[Path, typer.Argument(help="New folder for the quantized model.")],
    *,
    load: LoadOptions,
) -> None:
    """Write a model with quantized weights as compressed-tensors, for vLLM and transformers.

    Linear layers are quantized; experts in one tensor, embedding tables and the head stay dense.

    torchax-serve quantize qwen3-0.6b ./qwen3-0.6b-int4 --quantization int4
    """
    check_model(model, load.revision)
    if load.quantization is None:
        raise InvalidArgumentError("expected --quantization with a preset or a file of rules, got none; add it")
    from torchax_serve.cli.chat.interrupts import prompt_interrupts

    with prompt_interrupts(leave_at=1):
        end_if_explained(model, load)
        with passing_note("starting torch and jax ..."):
            from model_adapters.loading.progress import RichProgress, SilentProgress
            from model_adapters.loading.save_quantized import save_quantized

        load.show_details()
        options = load.serve_kwargs()
        rules = options.pop("quantization")
        progress = RichProgress() if may_style(sys.stderr) else SilentProgress()
        print(f"{out}: {save_quantized(model, out, rules, progress=progress, **options)}")


COMMAND = Command(
    "quantize",
    quantize,
    position=55,
    examples=(("quantize qwen3-0.6b ./out --quantization int4", "write it with 4 bits a weight"),),
)
