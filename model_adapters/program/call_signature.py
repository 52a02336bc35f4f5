"""The signature of a forward, and the names of its arguments for the decoder's tokens.

Encoder-decoder models have other names.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils import ModelOutput


@dataclasses.dataclass
class TensorOutput(ModelOutput):
    """Output of a forward that returns one tensor, and no class with fields."""

    tensor: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class CallSignature:
    """Argument names of the new tokens, their mask and their positions."""

    ids: str  # int64[batch, len]
    embeds: str  # float[batch, len, hidden], in their place
    mask: str  # which tokens are real
    positions: str

    @property
    def per_token_args(self) -> frozenset[str]:
        """All names of arguments per token, which may be padded along the sequence."""
        return frozenset({self.ids, self.embeds, self.mask, self.positions})

    @property
    def has_encoder(self) -> bool:
        """Whether the tokens are those of a decoder with an encoder."""
        return self is ENCODER_DECODER


DECODER_ONLY = CallSignature("input_ids", "inputs_embeds", "attention_mask", "position_ids")
ENCODER_DECODER = CallSignature(
    "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "decoder_position_ids"
)


def signature_of(config: Any, parameters: Collection[str]) -> CallSignature:
    """Returns the names that a forward with `parameters` has for the decoder's tokens."""
    has_encoder = bool(getattr(config, "is_encoder_decoder", False)) and ENCODER_DECODER.ids in parameters
    return ENCODER_DECODER if has_encoder else DECODER_ONLY


OLDER_CACHE_NAMES = ("past_key_values", "cache_params")
CACHE_NAMES = ("cache", *OLDER_CACHE_NAMES) if "cache" in ALL_CACHE_NAMES else OLDER_CACHE_NAMES
"""Names of the cache in forwards and outputs.

Where transformers has the name ``cache``, code of others may still have an older one."""


def cache_name_of(names: Collection[str]) -> str | None:
    """Returns the name of the cache among those of arguments or fields; None if there is none."""
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_field_of(output_class: type) -> str | None:
    """Returns the name of the cache field of an output dataclass; None if it has none."""
    return cache_name_of([field.name for field in dataclasses.fields(output_class)])


def cache_in(given: Mapping[str, Any]) -> Any:
    """Returns the cache among arguments or fields by name; None if there is none."""
    name = cache_name_of(given)
    return None if name is None else given[name]


def generate_cache_name(cache_name: str | None) -> str | None:
    """Returns the name by which transformers' ``generate`` passes a model's cache.

    `cache_name` is the name in the model's forward. Releases in which ``cache`` is a name use it for all models; for
    others the forward's own name stays.
    """
    return "cache" if cache_name is not None and "cache" in CACHE_NAMES else cache_name


def with_cache_named(given: dict[str, Any], cache_name: str | None) -> dict[str, Any]:
    """Returns `given`, arguments of a forward by name, with the cache under `cache_name`.

    Where transformers still accepts deprecated names, they are accepted here, too, with its FutureWarning. If both
    are given, the new one counts, as in transformers.
    """
    other = cache_name_of([name for name in given if name != cache_name])
    if cache_name is None or other is None or "cache" not in CACHE_NAMES:
        return given
    if other != "cache":  # which `generate` gives to forwards of any name
        warnings.warn(f"`{other}` is deprecated in transformers; pass `{cache_name}` instead", FutureWarning, 2)
    return {cache_name: given[other]} | {name: value for name, value in given.items() if name != other}


@functools.cache
def keeps_cache_with_labels(forward: Callable[..., Any]) -> bool:
    """Tells whether a forward of a class returns a cache where it has labels.

    Code that sets ``use_cache = False`` for labels does not, nor does code that cannot be read.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return False
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "labels" in _names(node.test)]
    assigned = [each for branch in branches for each in ast.walk(branch) if isinstance(each, ast.Assign)]
    return not any("use_cache" in _names(target) for each in assigned for target in each.targets)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


TORCH_CLASS = "_torch_class"
"""Attribute of a class that runs on JAX: the class as transformers has it."""
PATCHED = "_patched_forward"
"""Attribute of a model with the forward that a script had set before the model came to JAX."""


def forward_of(model: Any) -> tuple[Callable[..., Any], inspect.Signature]:
    """Returns the forward of `model` in PyTorch, bound to it, and its signature.

    One that a script has put in place of the class's and that takes anything has the signature of the class's.
    """
    cls = getattr(type(model), TORCH_CLASS, type(model))
    of_class = functools.partial(cls.forward, model)
    patched = vars(model).get(PATCHED)
    if patched is None:
        return of_class, inspect.signature(of_class)
    signature = inspect.signature(patched)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return patched, inspect.signature(of_class) if takes_any else signature
