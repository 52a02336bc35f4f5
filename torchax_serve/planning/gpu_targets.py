"""Descriptions of NVIDIA GPUs for XLA's CUDA plug-in.

With them XLA compiles for a GPU that is not present. The numbers are those that the device's driver reports
(multiprocessors, clock, cache, memory) and those of its compute capability in NVIDIA's programming guide (threads,
registers, shared memory).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Properties that differ between the GPUs."""

    description: str
    capability: int  # major version
    num_cores: int
    clock_ghz: float
    memory_bytes: int
    bytes_per_s: int
    l2_bytes: int


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 84_942_979_072, 3_352_320_000_000, 52_428_800),
    "h200": Gpu("NVIDIA H200", 9, 132, 1.98, 151_397_597_184, 4_800_000_000_000, 52_428_800),
    "b200": Gpu("NVIDIA B200", 10, 148, 1.965, 191_514_411_008, 7_672_320_000_000, 132_644_864),
}


def target_config(name: str) -> str:
    """Formats the description of a GPU as text of XLA's message ``GpuTargetConfigProto``."""
    gpu = GPUS[name]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: {gpu.num_cores} fpus_per_core: 128 clock_rate_ghz: {gpu.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bytes_per_s} l2_cache_size: {gpu.l2_bytes} device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {gpu.capability} minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.description}"
"""
