"""Every causal model type with quantized weights, next to eager PyTorch with the same weights made dense.

    python benchmarks/quantized_types.py --third 1          # every third type; results of the others stay in the file
    python benchmarks/quantized_types.py llama gpt2 --preset int4
    python benchmarks/quantized_types.py --preset fp8 --missing    # goes on where an earlier run has ended

Models are tiny and random, in float32. Compared are the distributions of the next token behind each token of a prompt:
the KL divergence must stay below 1e-3, which is what rounding activations to 8 bits costs. Where it does not, as where
a rounded number changes the choice of an expert, the same weights run with activations that are not rounded: below
1e-6 the type is "rounding", else it is "failed". Presets that leave activations as they are must stay below 1e-6. Each
type runs in a worker process with a time limit. Results are in benchmarks/results/quantized-types.json.
"""

import argparse
import copy
import dataclasses
import functools
import importlib.metadata
import json
import os
import sys
import warnings
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "quantized-types.json"
MAX_KL = 1e-3
"""Of the mean KL divergence, in nats."""


MAX_EXACT_KL = 1e-6
"""The same with activations that are not rounded: what the order of sums in float32 costs."""


def check(model_type, preset):
    """Serves a tiny model with quantized weights; returns the KL divergence and how many weights are quantized."""
    import torch

    from model_adapters.errors import UnsupportedModelError
    from model_adapters.quantization.rules import PRESETS, parse_rules
    from parity_sweep.tiny.models import prompts, rows_of, tiny_model

    try:
        model = tiny_model(model_type)
        ids = rows_of(model, prompts()[0])
        with torch.no_grad():
            model(input_ids=ids)
    except Exception as error:  # transformers or torch cannot build or run it
        return {"status": "impossible", "error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    assert preset in PRESETS
    try:
        kl, num_quantized = divergence(copy.deepcopy(model), ids, preset)
        found = {"kl": float(f"{kl:.2g}"), "num_quantized": num_quantized}
        rules = parse_rules(preset)
        rounds = any(rule.act_qtype is not None for rule in rules.rules)
        if abs(kl) < (MAX_KL if rounds else MAX_EXACT_KL) and num_quantized:
            return {"status": "passed", **found}
        if not rounds:
            return {"status": "failed", **found}
        exact = tuple(dataclasses.replace(rule, act_qtype=None) for rule in rules.rules)
        kl, num_quantized = divergence(model, ids, dataclasses.replace(rules, rules=exact))
    except UnsupportedModelError as error:
        return {"status": "refused", "error": str(error)[:200]}
    is_exact = abs(kl) < MAX_EXACT_KL and num_quantized
    return {"status": "rounding" if is_exact else "failed", **found, "kl_not_rounded": float(f"{kl:.2g}")}


def divergence(model, ids, quantization):
    """KL divergence of the next tokens of a served model from its weights made dense; number of quantized weights."""
    import torch

    from model_adapters.ops.compressed_weight import unpacked
    from model_adapters.ops.quantized_weight import QuantizedWeight
    from torchax_serve import serve

    dense = copy.deepcopy(model)
    with serve(model, quantization=quantization) as served:
        weights = served._loaded.weights
        quantized = [name for name, weight in weights.items() if isinstance(weight, QuantizedWeight)]
        state = dict(dense.named_parameters(remove_duplicate=False)) | dict(dense.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name in quantized:
                state[name].copy_(torch.from_numpy(jax_to_numpy(unpacked(weights[name]))))
            expected = dense(input_ids=ids).logits
        ours = served.torch_model(input_ids=ids).logits
    first, second = (torch.log_softmax(logits.double(), -1) for logits in (ours, expected))
    return float((second.exp() * (second - first)).sum(-1).mean()), len(quantized)


def jax_to_numpy(array):
    import numpy as np

    return np.array(array, np.float32)


def work(connection, preset):
    """Runs the loop of a worker process."""
    warnings.filterwarnings("ignore")
    from parity_sweep import sweep
    from torchax_serve.parity.result import Result

    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {sweep.QUICK_COMPILATION}"
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    connection.send("ready")
    while True:
        model_type = connection.recv()
        try:
            found = check(model_type, preset)
        except Exception as error:
            found = {"status": "failed", "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        result = Result(model_type, "", status=found.pop("status"), notes=[json.dumps(found)])
        connection.send(dataclasses.asdict(result))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all if none is named")
    parser.add_argument("--third", type=int, choices=(1, 2, 3), help="every third type")
    parser.add_argument("--preset", default="int8")
    parser.add_argument("--missing", action="store_true", help="types without a result of the preset alone")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one type")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    options = parser.parse_args()
    from parity_sweep import sweep
    from torchax_serve.parity.tasks import CAUSAL, TASKS

    types = options.types or TASKS[CAUSAL].types()
    types = types if options.third is None else types[options.third - 1 :: 3]
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "jax")}
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = stored.setdefault(options.preset, {"versions": versions, "types": {}})
    results["versions"] = versions
    types = [each for each in types if not (options.missing and each in results["types"])]
    failed = []
    for result in sweep.sweep(
        types,
        num_workers=options.workers,
        time_limit_s=options.time_limit,
        work=functools.partial(work, preset=options.preset),
    ):
        found = json.loads(result.notes[0]) if result.notes else {"error": result.error}
        results["types"][result.model_type] = {"status": result.status, **found}
        print(f"{result.model_type:32} {result.status:10} {found}", flush=True)
        failed += [result.model_type] if result.status in ("failed", "crashed", "timed out") else []
        results["types"] = dict(sorted(results["types"].items()))
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    print(f"{len(types)} types, failed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
