"""Blocks of GGUF files as values, scale and offset, bit for bit.

A tensor of a GGUF file is a row of blocks, each with the numbers of 32 or 256 columns and their scales. The layouts are
those of ``ggml-common.h`` and ``ggml-quants.c`` of ggml (github.com/ggml-org/llama.cpp), MIT licence.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from model_adapters.loading.formats.parts import QuantizedParts
from model_adapters.ops.quantized_weight import FP4_DOUBLED

BLOCK_BYTES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F64": (1, 8),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}
"""Numbers in a block and its bytes, of each type that is read."""

TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of ggml's types by their number in a file."""


def _halves(blocks: torch.Tensor, start: int, count: int = 1) -> torch.Tensor:
    """Returns float32[blocks, count] of float16 numbers at byte `start` of each block."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Returns uint8[blocks, 2n] of uint8[blocks, n]: all low halves, then all high ones.

    n is a multiple of 8.
    """
    words = np.ascontiguousarray(packed.numpy()).view(np.uint64)  # eight bytes at once, four times as fast
    halves = np.empty((words.shape[0], 2, words.shape[1]), np.uint64)
    low = np.uint64(0x0F0F0F0F0F0F0F0F)
    np.bitwise_and(words, low, out=halves[:, 0])
    np.bitwise_and(words >> np.uint64(4), low, out=halves[:, 1])
    return torch.from_numpy(halves.reshape(words.shape[0], -1).view(np.uint8))


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Returns bit 4 of 32 numbers, uint8[blocks, 32], from uint8[blocks, 4]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1) << 4


Unpacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Numbers int8[blocks, block], scales float32[blocks, groups], offsets likewise."""


def _q8_0(b: torch.Tensor) -> Unpacked:
    return b[:, 2:].contiguous().view(torch.int8), _halves(b, 0), None


def _q4_0(b: torch.Tensor) -> Unpacked:
    return _nibbles(b[:, 2:]).view(torch.int8) - 8, _halves(b, 0), None


def _q4_1(b: torch.Tensor) -> Unpacked:
    return _nibbles(b[:, 4:]).view(torch.int8), _halves(b, 0), _halves(b, 2)


def _q5_0(b: torch.Tensor) -> Unpacked:
    return (_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).view(torch.int8) - 16, _halves(b, 0), None


def _q5_1(b: torch.Tensor) -> Unpacked:
    return (_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).view(torch.int8), _halves(b, 0), _halves(b, 2)


def _k_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and minima float32[blocks, 8].

    They are 6-bit numbers in bytes 4 to 16, times two float16 numbers.
    """
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], 1)
    least = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], 1)
    return _halves(b, 0) * scale.float(), -(_halves(b, 2) * least.float())


def _q4_k(b: torch.Tensor) -> Unpacked:
    numbers = _nibbles(b[:, 16:].reshape(-1, 32)).reshape(-1, 256)
    return numbers.view(torch.int8), *_k_scales(b)


def _q5_k(b: torch.Tensor) -> Unpacked:
    low = _nibbles(b[:, 48:].reshape(-1, 32)).reshape(-1, 256)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((b[:, None, 16:48] >> shifts) & 1).flatten(1) << 4  # bit i of byte j belongs to number j of group i
    return (low | high).view(torch.int8), *_k_scales(b)


def _q6_k(b: torch.Tensor) -> Unpacked:
    low, high = _nibbles(b[:, :128].reshape(-1, 64)).reshape(-1, 2, 4, 32), b[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    numbers = (low | (((high >> shifts) & 3) << 4)).flatten(1).view(torch.int8) - 32
    scale = b[:, 192:208].contiguous().view(torch.int8).float()
    return numbers, _halves(b, 208) * scale, None


def _mxfp4(b: torch.Tensor) -> Unpacked:
    numbers = torch.tensor(FP4_DOUBLED, dtype=torch.int8)[_nibbles(b[:, 1:]).long()]
    return numbers, torch.exp2(b[:, :1].float() - 128), None


# Type: unpacks blocks; bits of a stored number.
_UNPACK: dict[str, tuple[Callable[[torch.Tensor], Unpacked], int]] = {
    "Q8_0": (_q8_0, 8),
    "Q4_0": (_q4_0, 4),
    "Q4_1": (_q4_1, 4),
    "Q5_0": (_q5_0, 8),
    "Q5_1": (_q5_1, 8),
    "Q4_K": (_q4_k, 4),
    "Q5_K": (_q5_k, 8),
    "Q6_K": (_q6_k, 8),
    "MXFP4": (_mxfp4, 4),
}

QUANTIZED_TYPES = tuple(_UNPACK)
"""Types that become a quantized weight."""

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_PLAIN |= {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}


def unpack_blocks(data: torch.Tensor, type_name: str, shape: tuple[int, ...]) -> QuantizedParts:
    """Returns the parts of a quantized tensor.

    Args:
        data: uint8[bytes], the blocks as they are in the file.
        type_name: One of `QUANTIZED_TYPES`.
        shape: ``[..., out, in]``; `in` is a multiple of the numbers in a block.
    """
    unpack, bits = _UNPACK[type_name]
    block, num_bytes = BLOCK_BYTES[type_name]
    numbers, scale, offset = unpack(data.reshape(-1, num_bytes))
    groups = (*shape[:-1], shape[-1] // block * scale.shape[1])
    return QuantizedParts(
        numbers.reshape(shape),
        scale.reshape(groups),
        None if offset is None else offset.reshape(groups),
        bits=bits,
        group=block // scale.shape[1],
        source=type_name,
    )


def plain_tensor(data: torch.Tensor, type_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the tensor of a type that is not quantized; `data` is uint8[bytes]."""
    return data.view(_PLAIN[type_name]).reshape(shape)
