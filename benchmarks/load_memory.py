"""Peak host memory of loading a checkpoint, over the checkpoint's size.

    python benchmarks/load_memory.py                      # 1 GB dense (Qwen3) and 1 GB with experts merged at load
    python benchmarks/load_memory.py --kind moe --megabytes 300 --dtype float32
    python benchmarks/load_memory.py --megabytes 2000 --devices 8 --save benchmarks/results/load-8-devices.json

    python benchmarks/load_memory.py --stored int4 --devices 4      # the files quantized (compressed-tensors)
    python benchmarks/load_memory.py --quantization int4            # quantized while they are loaded

    python benchmarks/load_memory.py --answer --megabytes 370 --kind dense   # first start and one answer, over imports

A first process writes random bfloat16 weights in several shards. A second one loads them, after a tiny model of the
same architecture, so that imports and compiled code are in its baseline, and reads the growth of its resident memory:
the high-water mark that Linux keeps, so no peak between two samples is missed. With --devices the weights go straight
to so many CPU devices, which are host memory too. With --stored the files are quantized, and their size is that of the
quantized ones. With --answer a process without stored programs serves one
conversation and answers once: it compiles, and its baseline is what importing the libraries takes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]

# bytes of a layer and of the embedding in bfloat16 follow from these; the number of layers makes up the size asked for
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 16000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": True,
    },
}


def _config(kind: str, megabytes: int, shrink: int = 1) -> Any:
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    shape = dict(SHAPES[kind])
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts")
    shape |= {key: max(4, shape[key] // shrink) for key in sizes if key in shape}
    config_class = CONFIG_MAPPING[shape["model_type"]]
    counts = []
    for num_layers in (1, 2):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config_class(**shape, num_hidden_layers=num_layers))
        counts.append(model.num_parameters())
    layer = counts[1] - counts[0]
    num_layers = max(1, round((megabytes * 1e6 / 2 - (counts[0] - layer)) / layer))
    return config_class(**shape, num_hidden_layers=num_layers, dtype="bfloat16")


def write(kind: str, megabytes: int, folder: Path, stored: str | None = None) -> None:
    """Writes a checkpoint of about `megabytes` in shards of a sixth of that, and a tiny one beside it.

    With `stored` they are quantized then, and smaller.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    for name, size, shrink in (("big", megabytes, 1), ("tiny", 1, 64)):
        model = transformers.AutoModelForCausalLM.from_config(_config(kind, size, shrink), dtype=torch.bfloat16)
        model.save_pretrained(folder / name, max_shard_size=f"{max(1, megabytes // 6)}MB")
        if stored is not None:
            from model_adapters.loading.save_quantized import save_quantized

            save_quantized(folder / name, folder / "quantized", stored)
            shutil.rmtree(folder / name)
            (folder / "quantized").rename(folder / name)


def load(
    folder: Path, dtype: str, random_weights: bool, devices: int, quantization: str | None = None
) -> dict[str, Any]:
    """Loads ``folder/big`` and returns what it took."""
    import jax

    from model_adapters.loading import load_model
    from model_adapters.loading.memory import PeakMemory
    from torchax_serve.distributed.mesh import mesh_for

    assert len(jax.devices()) == devices
    mesh = mesh_for(None, devices)
    options: dict[str, Any] = {"dtype": dtype, "random_weights": random_weights, "quantization": quantization}
    load_model(folder / "tiny", mesh=mesh, **options)
    peak = PeakMemory()
    loaded = load_model(folder / "big", mesh=mesh, **options)
    report = loaded.report
    on_disk = sum(file.stat().st_size for file in (folder / "big").glob("*.safetensors"))
    return {
        "architecture": type(loaded.module).__name__,
        "dtype": str(loaded.dtype),
        "num_devices": devices,
        "num_files": len(list((folder / "big").glob("*.safetensors"))),
        "files_bytes": on_disk,
        "weights_bytes": report.weights_bytes,
        "peak_growth_bytes": peak.growth_bytes,
        "peak_over_weights": round(peak.growth_bytes / report.weights_bytes, 3),
        "peak_over_files": round(peak.growth_bytes / on_disk, 3),
        "quantization": report.quantization,
        "load_s": round(report.load_s, 2),
        "bytes_per_s": round(report.weights_bytes / report.load_s),
    }


def answer(folder: Path) -> dict[str, Any]:
    """Serves ``folder/big``, answers 17 tokens, and returns what it took."""
    from model_adapters.loading.memory import PeakMemory
    from torchax_serve import EngineOptions, SamplingParams, serve
    from torchax_serve.entrypoints import torch_model  # noqa: F401  what serve imports counts as imports

    peak = PeakMemory()
    with serve(folder / "big", engine=EngineOptions(max_num_seqs=1)) as model:
        params = SamplingParams(max_new_tokens=17, ignore_eos=True)
        num_tokens = len(list(model.iter_tokens(list(range(3, 13)), params=params)))
        growth, weights_bytes = peak.growth_bytes, model.load_report.weights_bytes
        return {
            "num_tokens": num_tokens,
            "weights_bytes": weights_bytes,
            "cache": model.engine.description,
            "peak_growth_bytes": growth,
            "peak_without_1.3_weights_bytes": round(growth - 1.3 * weights_bytes),
        }


def measure(
    kind: str,
    megabytes: int,
    dtype: str = "auto",
    random_weights: bool = False,
    devices: int = 1,
    answers: bool = False,
    stored: str | None = None,
    quantization: str | None = None,
) -> dict[str, Any]:
    """Writes and loads in two processes of their own; returns the second one's numbers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]), "HF_HUB_OFFLINE": "1"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    with tempfile.TemporaryDirectory(prefix="load_memory") as folder:
        common = [sys.executable, __file__, "--kind", kind, "--megabytes", str(megabytes), "--folder", folder]
        flags = ["--dtype", dtype, "--devices", str(devices), *(["--random-weights"] if random_weights else [])]
        flags += [] if quantization is None else ["--quantization", quantization]
        common += [] if stored is None else ["--stored", stored]
        environment["XDG_CACHE_HOME"] = folder if answers else environment.get("XDG_CACHE_HOME", "")
        for step in (["write"], ["answer"] if answers else ["load", *flags]):
            done = subprocess.run([*common, "--step", *step], env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"step {step[0]} failed:\n{done.stderr}")
    return {"kind": kind, "random_weights": random_weights, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the checkpoint (10^6 bytes)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices that share the weights")
    parser.add_argument("--stored", help="preset by which the files are quantized")
    parser.add_argument("--quantization", help="preset by which weights are quantized while they are loaded")
    parser.add_argument("--answer", action="store_true", help="serve and answer, in place of loading alone")
    parser.add_argument("--save", type=Path, help="file for the results")
    parser.add_argument("--step", choices=["all", "write", "load", "answer"], default="all", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    of_load = (options.dtype, options.random_weights, options.devices, options.quantization)
    if options.step == "write":
        write(options.kind, options.megabytes, options.folder, options.stored)
    elif options.step == "answer":
        print(json.dumps(answer(options.folder)))
    elif options.step == "load":
        print(json.dumps(load(options.folder, *of_load)))
    else:
        results = []
        for kind in SHAPES if options.kind == "all" else [options.kind]:
            common = (options.dtype, options.random_weights, options.devices, options.answer, options.stored)
            results.append(measure(kind, options.megabytes, *common, options.quantization))
            print(json.dumps(results[-1]), flush=True)
        if options.save is not None:
            options.save.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
