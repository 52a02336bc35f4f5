"""Tokens a second of training steps on JAX and in eager PyTorch, on this machine, with random weights.

python benchmarks/training.py                      # LoRA and all weights of the 184 M shape, in float32
python benchmarks/training.py --shape tiny --seq-len 64 --repeats 3
python benchmarks/training.py --out results.json

Both make the same AdamW steps on the same tokens, in turns, so that other processes slow them down alike. The first
step of each is not counted. Losses are compared as well.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from torchax_serve.training import TrainingOptions
from torchax_serve.training.inputs import inputs_of
from torchax_serve.training.lora import adapter_of
from torchax_serve.training.packing import TrainingBatch
from torchax_serve.training.step import TrainState, make_step, optimizer_of
from torchax_serve.training.trainable import trainable_model

SHAPES = Path(__file__).parent / "shapes"
LORA = "r=16,alpha=32,targets=all-linear"


def model_of(shape, dtype):
    config = transformers.AutoConfig.for_model(**json.loads((SHAPES / f"{shape}.json").read_text()))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


class JaxSteps:
    """Steps as `train` makes them."""

    def __init__(self, module, lora, options, tokens):
        model = trainable_model(module, lora, options)
        optimizer = optimizer_of(options)
        ones = np.ones_like(tokens)
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        self._batch = jax.tree.map(lambda field: jnp.asarray(field)[None], TrainingBatch(tokens, ones, positions, ones))
        self._frozen = model.frozen
        self._state = jax.device_put(
            TrainState(jnp.zeros((), jnp.int32), model.trained, optimizer.init(model.trained)), jax.devices()[0]
        )
        self._step = jax.jit(make_step(model, inputs_of(model, packing=False), optimizer, None), donate_argnums=0)

    def step(self):
        self._state, result = self._step(self._state, self._frozen, self._batch)
        return float(result["loss"])


class TorchSteps:
    """The same steps in eager PyTorch, with its fused attention."""

    def __init__(self, module, lora, options, tokens):
        self._module = module if lora is None else adapter_of(module, lora, options.seed).eval()
        self._tokens = torch.from_numpy(tokens).long()
        trained = [each for each in self._module.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0)

    def step(self):
        logits = self._module(input_ids=self._tokens, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


def timed(step):
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    return time.perf_counter() - wall, time.process_time() - cpu, loss


def measure(module, lora, given):
    options = TrainingOptions(
        num_steps=given.repeats + 1, batch_size=given.rows, seq_len=given.seq_len, learning_rate=1e-4,
        max_grad_norm=None, packing=False, remat=given.remat,
    )  # fmt: skip
    vocab_size = module.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab_size, (given.rows, given.seq_len), dtype=np.int32)
    sides = {"pytorch": TorchSteps(copy.deepcopy(module), lora, options, tokens)}
    sides["jax"] = JaxSteps(copy.deepcopy(module), lora, options, tokens)
    first = {name: timed(side.step) for name, side in sides.items()}
    found = {name: [] for name in sides}
    for turn in range(given.repeats):
        for name in sides if turn % 2 else reversed(sides):
            found[name].append(timed(sides[name].step))
    gap = max(abs(a[2] - b[2]) for a, b in zip(*found.values(), strict=True))

    def ratio(column):
        pairs = zip(found["pytorch"], found["jax"], strict=True)
        return round(statistics.median(theirs[column] / ours[column] for theirs, ours in pairs), 2)

    rates = {
        f"{name}_tokens_per_s": round(tokens.size / statistics.median(each[0] for each in rows), 1)
        for name, rows in found.items()
    }
    return {
        "trained": "all weights" if lora is None else lora,
        **rates,
        "ratio": ratio(0),
        "ratio_of_processor_time": ratio(1),
        "jax_first_step_s": round(first["jax"][0], 2),
        "largest_difference_of_losses": float(f"{gap:.2g}"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-184m", help="a file of benchmarks/shapes")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    module = model_of(given.shape, given.dtype)
    results = []
    for lora in (LORA, None):
        results.append(measure(module, lora, given))
        print(json.dumps(results[-1]), flush=True)
    report = {
        "shape": given.shape,
        "dtype": given.dtype,
        "rows": given.rows,
        "seq_len": given.seq_len,
        "remat": given.remat,
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "versions": {each.__name__: each.__version__ for each in (jax, torch, transformers)},
        "results": results,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
