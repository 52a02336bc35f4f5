"""Modules of other libraries beside eager PyTorch: what `to_jax` returns for random weights, and gradients.

    pip install --no-deps --target modules pytorchcv torch-geometric x-transformers einops einx frozendict loguru \\
        torch-einops-utils fair-esm
    PYTHONPATH=modules python benchmarks/modules.py                    # all that have no row yet
    PYTHONPATH=modules python benchmarks/modules.py --part 1/20        # every twentieth
    PYTHONPATH=modules python benchmarks/modules.py --show             # counts, and what differs

Of pytorchcv these are all models of images of 224 pixels by name, one image each; of torch-geometric its models and
convolutions on a graph of four nodes; a few of x-transformers and fair-esm. A row says whether outputs are within 1e-4
of PyTorch's, relative to the largest number of an output where that is above 1, and gradients of the mean square by
the weights within 1e-3. torchvision is not installed: an empty module stands for it where a library imports it in vain.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import unittest.mock
import warnings
from collections import Counter
from pathlib import Path

import jax
import torch

from parity_sweep.sweep import QUICK_COMPILATION
from torchax_serve import extract_jax, to_jax
from torchax_serve.parity.result import error_line

RESULTS = Path(__file__).with_name("results") / "modules.jsonl"
OUTPUTS, GRADIENTS = 1e-4, 1e-3
MOST_WEIGHTS = 30e6
"""Weights of the largest module that is compared."""


def image(size=224):
    return (torch.randn(1, 3, size, size),)


def tokens():
    return (torch.randint(4, 24, (1, 12)),)


def graph():
    return torch.randn(4, 8), torch.tensor([[0, 1, 1, 2, 3, 0], [1, 0, 2, 1, 0, 3]])


def of_pytorchcv():
    from pytorchcv.model_provider import _models, get_model

    small = ("cifar10", "cifar100", "svhn")
    return {
        f"pytorchcv {name}": (lambda name=name: get_model(name), (lambda: image(32)) if name.endswith(small) else image)
        for name in sorted(_models)
    }


def of_geometric():
    from torch_geometric import nn

    models = ("GCN", "GAT", "GraphSAGE", "GIN", "EdgeCNN")
    found = {f"torch_geometric {name}": (lambda name=name: getattr(nn, name)(8, 16, 2, 4), graph) for name in models}
    convolutions = (
        "GCN GATv2 Transformer SAGE Graph TAG ARMA SG ResGatedGraph LE ClusterGCN GEN FiLM SuperGAT EG General"
    )
    for name in convolutions.split():
        found[f"torch_geometric {name}Conv"] = (lambda name=name: getattr(nn, f"{name}Conv")(8, 16), graph)
    return found


def of_transformers():
    from esm.model.esm2 import ESM2
    from x_transformers import Decoder, Encoder, TransformerWrapper

    def wrapped(layers, **options):
        made = layers(dim=64, depth=2, heads=4, **options)
        return TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=made)

    return {
        "x_transformers decoder": (lambda: wrapped(Decoder, rotary_pos_emb=True), tokens),
        "x_transformers decoder, alibi": (lambda: wrapped(Decoder, alibi_pos_bias=True, ff_glu=True), tokens),
        "x_transformers encoder": (lambda: wrapped(Encoder, macaron=True), tokens),
        "fair-esm ESM2": (lambda: ESM2(num_layers=2, embed_dim=64, attention_heads=4, alphabet="ESM-1b"), tokens),
    }


def cases():
    """What is compared by name: how it is made, and its inputs."""
    found = {}
    for library in (of_geometric, of_transformers, of_pytorchcv):
        try:
            found |= library()
        except ImportError as error:
            print(f"{library.__name__}: left out, {error}")
    return found


def difference(ours, theirs):
    """The largest difference, relative to the largest number of a tensor where that is above 1."""
    found = 0.0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if isinstance(b, torch.Tensor) and b.numel():
            b = b.detach().float()
            a = torch.tensor(jax.device_get(a)).float() if isinstance(a, jax.Array) else a.float()
            found = max(found, float((a - b).abs().max()) / max(1.0, float(b.abs().max())))
    return found


def mean_square(outputs):
    floats = [each for each in jax.tree.leaves(outputs) if each.dtype in (torch.float32, jax.numpy.float32)]
    return sum((each**2).mean() for each in floats)


def compared(name, make, inputs, has_gradients):
    """The row of a module."""
    began, row = time.monotonic(), {"name": name}
    try:
        torch.manual_seed(0)
        module, args = make().eval(), inputs()
        row["weights"] = sum(each.numel() for each in module.parameters())
        if row["weights"] > MOST_WEIGHTS:
            return row | {"status": "too large"}
        theirs = module(*args)
    except Exception as error:
        return row | {"status": "impossible", "error": error_line(error)}
    try:
        if has_gradients:
            mean_square(theirs).backward()
            wanted = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
            weights, function = extract_jax(module)
            others = {name: each for name, each in weights.items() if name not in wanted}
            gradient = jax.grad(lambda some: mean_square(function({**others, **some}, args)))
            some = {name: weights[name] for name in wanted}
            try:
                found = jax.jit(gradient)(some)
            except (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError):
                found = gradient(some)  # the code reads its integers, which are values outside of a jit
            row["gradients"] = max((difference(found[name], each) for name, each in wanted.items()), default=0.0)
        row["outputs"] = difference(to_jax(module)(*args), theirs)
    except Exception as error:
        return row | {"status": "failed", "error": error_line(error)}
    right = row["outputs"] <= OUTPUTS and row.get("gradients", 0.0) <= GRADIENTS
    return row | {"status": "passed" if right else "differs", "seconds": round(time.monotonic() - began, 1)}


def show(rows):
    print(dict(Counter(row["status"] for row in rows.values())))
    for row in rows.values():
        if row["status"] in ("failed", "differs"):
            print(row["name"], {key: row[key] for key in ("outputs", "gradients", "error") if key in row})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", metavar="N/M", help="every M-th, from the N-th on")
    parser.add_argument("--no-gradients", action="store_true", help="outputs alone")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    if not options.show:
        warnings.filterwarnings("ignore")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"  # each program runs once
        for each in ("torchvision", "torchvision.transforms", "torchvision.ops"):
            sys.modules.setdefault(each, unittest.mock.MagicMock())
        first, step = map(int, options.part.split("/"))
        known = cases()
        for name in list(known)[first - 1 :: step]:
            if name not in rows:
                rows[name] = compared(name, *known[name], not options.no_gradients)
                with options.results.open("a") as file:
                    print(json.dumps(rows[name]), file=file)
                print(rows[name], flush=True)
    show(rows)


if __name__ == "__main__":
    main()
