"""Run with eight CPU devices: losses and weights of training on meshes, next to one device. Prints a line a mesh."""

import sys
from pathlib import Path

import jax
import numpy as np
from training_models import rows, tiny_folder

from torchax_serve.training import TrainingOptions, train

SIZES = {"num_steps": 3, "batch_size": 8, "seq_len": 64, "learning_rate": 1e-2, "seed": 1}


def main(folder: Path) -> None:
    assert len(jax.devices()) == 8
    model = tiny_folder(folder / "model")
    single = train(model, rows(), out=folder / "one", options=TrainingOptions(**SIZES))
    for lora, mesh in (
        (None, {"fsdp": 8}),
        (None, {"fsdp": 4, "model": 2}),
        ("r=4,targets=q_proj", {"data": 2, "fsdp": 2}),
    ):
        reference = single
        if lora:
            reference = train(model, rows(), out=folder / "lora", options=TrainingOptions(**SIZES), lora=lora)
        name = "-".join(f"{axis}{size}" for axis, size in mesh.items())
        result = train(model, rows(), out=folder / name, options=TrainingOptions(**SIZES, mesh=mesh), lora=lora)
        np.testing.assert_allclose(result.losses, reference.losses, rtol=1e-5)
        restored = train(model, rows(), out=folder / name, options=TrainingOptions(**SIZES, mesh=mesh), lora=lora)
        assert restored.losses == result.losses
        print(name, "lora" if lora else "all", "same losses", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
