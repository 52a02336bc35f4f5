"""Run with eight CPU devices: losses of training on meshes, next to one device or PyTorch. Prints a line a mesh."""

import sys
from pathlib import Path

import jax
import numpy as np
import torch
from training_models import batches_of, rows, tiny_folder, torch_steps
from transformers import AutoModelForCausalLM

from torchax_serve.training import TrainingOptions, train
from torchax_serve.training.lora import adapter_of

SIZES = {"num_steps": 3, "batch_size": 8, "seq_len": 64, "learning_rate": 1e-2, "seed": 1, "max_grad_norm": None}
LORA = "r=4,targets=q_proj"


def main(folder: Path) -> None:
    assert len(jax.devices()) == 8
    model = tiny_folder(folder / "model")
    single = train(model, rows(), out=folder / "one", options=TrainingOptions(**SIZES))
    options = TrainingOptions(**SIZES, mesh={"data": 2, "fsdp": 2, "model": 2})
    result = train(model, rows(), out=folder / "all", options=options)
    np.testing.assert_allclose(result.losses, single.losses, rtol=1e-5)
    assert train(model, rows(), out=folder / "all", options=options).losses == result.losses  # by its checkpoint
    print("data2-fsdp2-model2 all same losses", flush=True)

    options = TrainingOptions(**SIZES, mesh={"fsdp": 8})
    result = train(model, rows(), out=folder / "lora", options=options, lora=LORA)
    module = adapter_of(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), LORA, options.seed)
    expected = torch_steps(module, batches_of(result.model, options), options.learning_rate)
    np.testing.assert_allclose(result.losses, expected, rtol=1e-5)
    print("fsdp8 lora same losses", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
