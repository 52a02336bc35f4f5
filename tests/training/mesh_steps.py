"""Run with eight CPU devices: losses of training on meshes, next to those of PyTorch. Prints a line a mesh."""

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
RUNS = (({"data": 2, "fsdp": 2, "model": 2}, None), ({"fsdp": 2}, "r=4,targets=q_proj"))


def main(folder: Path) -> None:
    assert len(jax.devices()) == 8
    model = tiny_folder(folder / "model")
    for mesh, lora in RUNS:
        name = "-".join(f"{axis}{size}" for axis, size in mesh.items())
        options = TrainingOptions(**SIZES, mesh=mesh)
        result = train(model, rows(), out=folder / name, options=options, lora=lora)
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if lora is not None:
            module = adapter_of(module, lora, options.seed)
        expected = torch_steps(module, batches_of(result.model, options), options.learning_rate)
        np.testing.assert_allclose(result.losses, expected, rtol=1e-5)
        again = train(model, rows(), out=folder / name, options=options, lora=lora)  # by its checkpoint
        assert again.losses == result.losses
        print(name, "lora" if lora else "all", "same losses", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
