"""Prefill of a long prompt in one step, two ways, compiled for chips that need not be here: what devices exchange.

    python benchmarks/sequence_parallel.py [v6e:2x4 32768]   # needs the extra plan; results/sequence-parallel.json

`tensor`: every device has all tokens and its part of every product, and sums are exchanged (Shoeybi et al. 2019).
`sequence`: every device has its part of the tokens and gathers the weights of each layer; before attention tokens are
exchanged for heads and behind it heads for tokens (DeepSpeed-Ulysses, Jacobs et al. 2023), so that the kernel is the
same. The engine takes the second from `ModelSharding.min_tokens_to_shard` tokens in a step on. Layers have the shape of
Llama 3
70B: a step with two less a step with one is what a layer takes.
"""

import json
import os
import sys
import warnings
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "sequence-parallel.json"
SHAPE = Path(__file__).with_name("shapes") / "llama-3-70b.json"
TOPOLOGIES = ("v5e:2x4", "v6e:2x4")
LENGTHS = (8192, 32768, 65536)
# Bytes that a device sends, by bytes of the result, on n devices in rings.
SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


def compiled(topology, length, num_layers, way):
    import torch

    from model_adapters.loading.model_class import find_class, load_config, module_of
    from torchax_serve.distributed.mesh import mesh_of
    from torchax_serve.planning.abstract_model import abstract_model
    from torchax_serve.planning.cache_sizes import CacheSizes
    from torchax_serve.planning.compiled_steps import compile_step
    from torchax_serve.planning.executors import planned_executor
    from torchax_serve.planning.topology import compiling_for, describe
    from torchax_serve.runtime.model_runtime import ModelRuntime

    model_class, config = find_class(load_config(SHAPE, trust_remote_code=False), folder=None, trust_remote_code=False)
    config.num_hidden_layers, config.vocab_size, config.max_position_embeddings = num_layers, 1024, length
    module = module_of(model_class, config, torch.bfloat16)
    chip, devices = describe(topology)
    mesh = mesh_of(devices, {"model": len(devices)})
    model = abstract_model(module, mesh)
    runtime = ModelRuntime(module, model.weights, sharding=model.sharding)
    with compiling_for(chip):
        executor = planned_executor(runtime, model.sharding, 64, length, 1)
    plan, num_slots = CacheSizes(model, chip, executor, 64, length, 1).plan()
    _, step = executor.steps(plan, num_slots, [length])
    least = model.sharding.min_tokens_to_shard
    vars(model.sharding)["min_tokens_to_shard"] = None if way == "tensor" else 1  # whatever the length
    report, _ = compile_step(step, model, chip)
    return report, len(devices), least


def run(topology, length, way):
    (two, number, least), (one, *_) = (compiled(topology, length, layers, way) for layers in (2, 1))
    collectives = {}
    for kind in {*two.collectives, *one.collectives}:
        (n2, b2), (n1, b1) = two.collectives.get(kind, (0, 0)), one.collectives.get(kind, (0, 0))
        if n2 - n1:
            collectives[kind] = [n2 - n1, b2 - b1]
    return {
        "topology": topology,
        "length": length,
        "way": way,
        "divided_from": least,
        "collectives_of_a_layer": collectives,
        "sent_mb": round(sum(SENT[kind](number) * size for kind, (_, size) in collectives.items()) / 1e6, 1),
        "gflop": round((two.flops - one.flops) / 1e9, 1),
        "temporary_gb": round(two.temporary_bytes / 1e9, 3),
        "compiler_ms": round((two.compiler_s - one.compiler_s) * 1e3, 3),
        "compile_s": round(two.compile_s + one.compile_s, 1),
    }


def main():
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("ignore")
    wanted = set(sys.argv[1:])  # topologies and lengths
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for topology in TOPOLOGIES:
        for length in LENGTHS:
            for way in ("tensor", "sequence"):
                if wanted and not {topology, str(length)} <= wanted:
                    continue
                key = (topology, length, way)
                try:
                    row = run(*key)
                except Exception as error:
                    said = " ".join(str(error).split())[:300]
                    row = dict(zip(("topology", "length", "way"), key, strict=True), error=said)
                print(json.dumps(row), flush=True)
                rows = [each for each in rows if (each["topology"], each["length"], each["way"]) != key] + [row]
                RESULTS.write_text("[\n" + ",\n".join(json.dumps(each) for each in rows) + "\n]\n")


if __name__ == "__main__":
    main()
