"""Seconds of a denoising step on JAX and in eager PyTorch, on this machine, with random weights in float32.

python benchmarks/diffusion.py                     # all shapes
python benchmarks/diffusion.py dit-s flux-small    # some of them
python benchmarks/diffusion.py --out results.json

Both run in turns, so that other processes slow them down alike. The first call, which compiles, is not counted.
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
import torch
from diffusers import (
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)

from torchax_serve import to_jax

TEXT_LEN = 77


def dit(width, num_layers, num_heads):
    """DiT of patches of 2 x 2 latents, for images of 256 x 256 pixels: 256 tokens, two rows."""
    model = DiTTransformer2DModel(
        num_attention_heads=num_heads,
        attention_head_dim=width // num_heads,
        in_channels=4,
        out_channels=8,
        num_layers=num_layers,
        sample_size=32,
    )
    given = {"hidden_states": torch.randn(2, 4, 32, 32), "timestep": torch.tensor([500, 500])}
    return model, given | {"class_labels": torch.tensor([1, 1000])}


def flux():
    """Flux with 12 heads of 64, for images of 512 x 512 pixels: 1024 image tokens."""
    model = FluxTransformer2DModel(
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=64,
        num_attention_heads=12,
        in_channels=64,
        joint_attention_dim=768,
        axes_dims_rope=(16, 24, 24),
        guidance_embeds=False,
    )
    return model, {
        "hidden_states": torch.randn(1, 1024, 64),
        "encoder_hidden_states": torch.randn(1, TEXT_LEN, 768),
        "pooled_projections": torch.randn(1, 768),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(1024, 3),
        "txt_ids": torch.zeros(TEXT_LEN, 3),
    }


def sd3():
    """Stable Diffusion 3 with 12 layers of 768, for images of 512 x 512 pixels: 1024 image tokens, two rows."""
    model = SD3Transformer2DModel(
        sample_size=64,
        num_layers=12,
        attention_head_dim=64,
        num_attention_heads=12,
        joint_attention_dim=768,
        caption_projection_dim=768,
        pooled_projection_dim=768,
        out_channels=16,
    )
    return model, {
        "hidden_states": torch.randn(2, 16, 64, 64),
        "encoder_hidden_states": torch.randn(2, TEXT_LEN, 768),
        "pooled_projections": torch.randn(2, 768),
        "timestep": torch.tensor([500.0, 500.0]),
    }


def unet(channels, size):
    """UNet of the shape of Stable Diffusion 1.5 with these channels, for `size` x `size` latents, two rows."""
    model = UNet2DConditionModel(
        sample_size=64,
        block_out_channels=channels,
        layers_per_block=2,
        cross_attention_dim=768,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    )
    return model, {
        "sample": torch.randn(2, 4, size, size),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(2, TEXT_LEN, 768),
    }


SHAPES = {
    "dit-s": lambda: dit(384, 12, 6),
    "dit-b": lambda: dit(768, 12, 12),
    "flux-small": flux,
    "sd3-small": sd3,
    "unet-small": lambda: unet((128, 256, 512, 512), 32),
    "unet-sd15": lambda: unet((320, 640, 1280, 1280), 32),
}


def measure(name, repeats):
    """Medians of seconds and processor seconds of both, and of the ratios of seconds of each pair."""
    torch.manual_seed(0)
    eager, given = SHAPES[name]()
    eager.eval()
    model = to_jax(copy.deepcopy(eager))
    seconds, cpu_seconds = {"pytorch": [], "jax": []}, {"pytorch": [], "jax": []}
    outputs = {}
    began = time.perf_counter()
    with torch.no_grad():
        outputs["jax"] = model(**given, return_dict=False)[0]
        compile_s = time.perf_counter() - began
        outputs["pytorch"] = eager(**given, return_dict=False)[0]
        for _ in range(repeats):
            for which, module in (("pytorch", eager), ("jax", model)):
                began, cpu = time.perf_counter(), time.process_time()
                module(**given, return_dict=False)
                seconds[which].append(time.perf_counter() - began)
                cpu_seconds[which].append(time.process_time() - cpu)
    difference = float((outputs["jax"] - outputs["pytorch"]).abs().max())
    ratios = [theirs / ours for theirs, ours in zip(seconds["pytorch"], seconds["jax"], strict=True)]
    return {
        "parameters": sum(each.numel() for each in eager.parameters()),
        "pytorch_s": round(statistics.median(seconds["pytorch"]), 4),
        "jax_s": round(statistics.median(seconds["jax"]), 4),
        "times_pytorch": round(statistics.median(ratios), 3),
        "pytorch_cpu_s": round(statistics.median(cpu_seconds["pytorch"]), 4),
        "jax_cpu_s": round(statistics.median(cpu_seconds["jax"]), 4),
        "first_call_s": round(compile_s, 1),
        "largest_difference": float(f"{difference:.1e}"),
        "repeats": repeats,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", choices=[[], *SHAPES], help="all if none is named")
    parser.add_argument("--repeats", type=int, default=9, help="timed pairs of steps")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {}
    for name in arguments.shapes or SHAPES:
        results[name] = measure(name, arguments.repeats)
        print(name, json.dumps(results[name]), flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    content = {"jax": jax.__version__, "torch": torch.__version__, "machine": machine, "results": results}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
