"""Record of the needs of one architecture of transformers beyond the general rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Run = Callable[[str, dict[str, Any]], Any]
"""Calls a method of a part of the model on JAX, by its dotted path and keyword arguments."""


@dataclasses.dataclass(frozen=True, eq=False)
class Quirk:
    """Differences from the general rules for one architecture.

    Attributes:
        methods: Functions by ``Class.method``, written in torch, that replace those methods while a model is traced.
            Nothing is replaced outside of a trace, and nothing in another architecture.
        functions: The same for functions of the modeling file, by name. A name that a release lacks is ignored.
        right_aligned_cache: The code counts from the end of the keys, so the newest token must be the last one
            (`model_adapters.caches.layers`).
        unmasked_sliding_cache: The model masks nothing itself and relies on the sliding cache dropping old tokens.
        token_by_token: Tokens of one forward see later ones, so a sequence goes on one token per forward.
        ignored_arguments: Arguments that the forward accepts and never reads; their shapes need no program of their
            own.
        native_cache_reason: Why results depend on transformers' own cache, which then goes through the programs and
            grows.
        native_cache_if: Whether `native_cache_reason` holds for a module of the architecture; None: for all.
        fixed_cache_is_safe: The model is known to run on a cache of fixed shapes; the probe, which has tokens only,
            cannot show it, as every token comes with audio.
        causal_without_mask: The code makes a causal mask, or a recurrence, without transformers' mask functions.
        shifted_mask: The code shifts the mask of later tokens, so that these see what padding has computed.
        mixes_neighbours: Tokens are mixed by other means than masked attention, so padding is never safe.
        reads_mask_on_host: The encoder reads the values of its mask on the host, so a program is for one mask.
        encoder_mask: Function of the configuration: stride, kernel size and padding of the encoder's convolutions, as
            if they were one, by which the decoder computes how many encoder outputs are real. The function returns None
            where that is not known.
        encoder_returns_mask: The decoder reads a mask that the encoder returns with its output.
        keeps_value_heads: Values are also read by a product other than the output's: on a mesh their heads cannot be
            repeated.
        packed_interface: In a packed step the code attends through transformers' attention interface, though its class
            refuses other kernels than its own.
        spans_in: Kind of layers (``layer_types``) in which tokens of an image see each other; None: in all layers.
        submodules: Replaces methods of parts of the given model that ``generate`` itself calls, to run on JAX.
        media_options: Arguments of ``generate`` that are added to what a processor makes of a conversation or of audio.
    """

    methods: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    functions: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    right_aligned_cache: bool = False
    unmasked_sliding_cache: bool = False
    token_by_token: bool = False
    ignored_arguments: frozenset[str] = frozenset()
    native_cache_reason: str | None = None
    native_cache_if: Callable[[Any], bool] | None = None
    fixed_cache_is_safe: bool = False
    causal_without_mask: bool = False
    shifted_mask: bool = False
    mixes_neighbours: bool = False
    reads_mask_on_host: bool = False
    encoder_mask: Callable[[Any], tuple[int, int, int] | None] | None = None
    encoder_returns_mask: bool = False
    keeps_value_heads: bool = False
    packed_interface: bool = False
    spans_in: str | None = None
    submodules: Callable[[Any, Run], None] | None = None
    media_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def native_cache_reason_of(self, module: Any) -> str | None:
        """Returns why `module` keeps transformers' own cache; None where it does not."""
        applies = self.native_cache_if is None or self.native_cache_if(module)
        return self.native_cache_reason if applies else None

    def summary(self) -> dict[str, str]:
        """Returns the fields that differ from the default, as text."""
        found = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value or field.name == "native_cache_if":
                continue
            if isinstance(value, (Mapping, frozenset)):
                found[field.name] = ", ".join(value)
            else:
                found[field.name] = value if isinstance(value, str) else "yes"
        return found
