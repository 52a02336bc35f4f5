"""Ways to trace one forward.

They differ in the attention mask, the right alignment of the cache and the folding of constants.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from model_adapters.caches.device_cache import LayerStates
from model_adapters.ops.compressed_weight import Weights
from model_adapters.program.call_spec import CallSpec


@dataclasses.dataclass(frozen=True)
class TraceMode:
    """One way to call the forward of a model.

    Attributes:
        masked: The forward gets an attention mask.
        right_aligned: The cache returns keys and values shifted so that the newest token is last.
        folding: What is computed of constants only is computed while tracing.
    """

    masked: bool
    right_aligned: bool
    folding: bool


@dataclasses.dataclass(frozen=True)
class ForwardCall:
    """The arguments of one forward that is traced.

    Attributes:
        weights: Every tensor of the module by qualified name.
        states: Cache layers, or None for a forward without a cache.
        offset: int32[], number of tokens already stored in the cache.
        inputs: Arrays by the forward's argument names.
        spec: The static arguments.
        starts: int32[batch], first position of each row that is not left padding; None: nothing says so.
        last: int32[], position of the only token whose logits are asked for; None: all.
    """

    weights: Weights
    states: LayerStates | None
    offset: jax.Array | None
    inputs: dict[str, Any]
    spec: CallSpec
    starts: jax.Array | None
    last: jax.Array | None


def trace_modes(
    *, has_starts: bool, must_mask: bool, may_right_align: bool, must_right_align: bool, must_fold: bool
) -> tuple[TraceMode, ...]:
    """Returns the trace modes to try in turn, the cheapest first.

    They are tried until the model's code can be traced. Some models count positions by a mask that they make
    themselves, of a length that only the host could know; some count from the end of the keys, or compare their number.

    Args:
        has_starts: Whether the start of each row is given, of which a mask can be made.
        must_mask: Whether the model is known to need a mask.
        may_right_align: Whether the cache can be right-aligned.
        must_right_align: Whether the model is known to need that where it can be.
        must_fold: Whether the model is known to need constants folded.
    """
    aligned = ((True, True),) if may_right_align else ()
    if not has_starts:
        ways: tuple[tuple[bool, bool], ...] = ((False, False),)
    elif must_right_align and aligned:
        ways = aligned
    elif must_mask:
        ways = ((True, False), *aligned)
    else:
        ways = ((False, False), (True, False), *aligned)
    return tuple(TraceMode(*way, folding) for folding in ((True,) if must_fold else (False, True)) for way in ways)
