"""From a loaded model to an engine: which road it takes, how much memory there is for it, what fits."""

from __future__ import annotations

import dataclasses

from model_adapters.errors import InvalidArgumentError
from torchax_serve.engine.engine import MAX_NUM_WAITING
from torchax_serve.scheduler.config import check_whole
from torchax_serve.validation.argument_hints import fields_refuse_unknown

MAX_LEN = 32768
"""Longest request where nothing else limits it: page tables and masks are that wide."""


MAX_DISPATCH_S = 0.1
"""What several decode steps in one dispatch may take. A request that comes meanwhile waits for them."""


MAX_SOURCE_LEN = 1024


MAX_ANSWER_LEN = 4096
"""Of an encoder-decoder model where nothing else limits them. Keys and values of the input are kept for each slot."""


@fields_refuse_unknown
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the engine is laid out. None: chosen from the model and the memory there is.

    Attributes:
        max_len: prompt and answer of one request, in tokens; the model's own limit if None.
        num_slots: requests that run at once; fewer of a model that hears, where keys and values of so many sounds would
            take more than half of the memory.
        page_len: tokens of a page of the cache.
        max_source_len: what an encoder beside the decoder may be given, in tokens; each slot has room for the keys and
            values of that many. None: as many as the encoder has positions, 1024 at the most, and less where that would
            take more than half of the memory. An encoder of sounds that hears one length takes None alone.
        kv_cache_bytes: bytes of all pages together.
        token_budget: tokens computed in one step.
        prefix_caching: whether requests share the pages of a common beginning.
        max_num_waiting: requests that may wait for a slot; one more is refused with `QueueFullError`. `generate_batch`
            waits with more prompts than that by itself.
        max_num_steps: most decode steps sent to the device at once while nothing waits. Fewer are sent where they
            would take more than a tenth of a second, for a request that comes waits for them.
        max_decode_slowdown: by which factor prompts that come may lengthen the time per token of requests that run. A
            larger one brings first tokens sooner and a batch of many prompts to its end sooner.
        kv_cache_dtype: "int8" keeps keys and values in 8 bits, so that twice as many tokens of a 16-bit model fit; each
            layer and head has a scale for keys and one for values, found at the start by a prompt of random tokens.
            None: in the model's dtype.
        batch_invariant: whether a request computes the same to the last bit alone and among others, which float32 does
            on a CPU in any case. In bfloat16 and float16 up to four requests at once then go without a faster order of
            sums (about a quarter of their tokens per second).
    """

    max_len: int | None = None
    num_slots: int = 32
    page_len: int = 16
    kv_cache_bytes: int | None = None
    token_budget: int = 256
    prefix_caching: bool = True
    max_num_steps: int = 16
    max_decode_slowdown: float = 2.0
    batch_invariant: bool = False
    kv_cache_dtype: str | None = None
    max_source_len: int | None = None
    max_num_waiting: int = MAX_NUM_WAITING

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise InvalidArgumentError(f"{field.name}: expected True or False, got {value!r}")
            elif field.name == "kv_cache_dtype":
                if value not in (None, "int8"):
                    raise InvalidArgumentError(f"kv_cache_dtype: expected 'int8' or None, got {value!r}")
            elif field.name == "max_decode_slowdown":
                if isinstance(value, bool) or not isinstance(value, int | float) or not value > 1:
                    raise InvalidArgumentError(f"max_decode_slowdown: expected a number above 1, got {value!r}")
            elif value is not None or field.default is not None:
                check_whole(field.name, value, 1, "None chooses" if field.default is None else "give a positive number")
