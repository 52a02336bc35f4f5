"""What a language model gets of images and audio, inside its multimodal forward.

The code of such a model embeds the tokens, puts the features of its encoder in place of placeholders, and calls its
language model. `language_model_inputs` runs that code up to the call. Later forwards get token ids alone, and
`features_in_place` puts the same features into what the embedding returns.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.attention import attention_name
from model_adapters.bridge.views import as_views, jax_view, torch_view
from model_adapters.caches.packed_batch import MediaTokens
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings import constant_folding, deferred_checks
from model_adapters.ops.compressed_weight import Weights
from model_adapters.program.call_signature import CACHE_NAMES
from model_adapters.program.call_spec import CallSpec
from model_adapters.program.embeddings import token_embedding
from model_adapters.program.model_program import CHECKS, ModelProgram
from model_adapters.program.static_tensors import as_tensors, without_constants
from model_adapters.program.trace_context import replaced_methods

_MEDIA = re.compile(r".*(pixel|image|video|audio|patches|input_features|input_values).*")
"""Names of arguments by which a forward gets images or audio."""
_TEXT = frozenset({"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", *CACHE_NAMES})
"""Arguments of a language model that later forwards bring themselves."""

_ENCODED = "mm_encoder_outputs"
"""Argument by which a forward gets what encoders have returned."""
VISIBLE = "visible "
"""Begin of the names of masks by kind of layers; the kind is empty where layers are of one."""
_DEEPSTACK, _DEEPSTACK_MASK, _ADD_DEEPSTACK = "deepstack_visual_embeds", "visual_pos_masks", "_deepstack_process"
"""Features that a language model adds behind its first layers (Qwen3-VL), the tokens that they are added to, and the
method that adds them."""


class _Reached(BaseException):
    """Raised where model code calls its language model; no error handler of model code stops it."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = given


def takes_media(module: torch.nn.Module) -> bool:
    """Returns whether the forward of `module` takes images or audio."""
    return any(_MEDIA.fullmatch(name) for name in inspect.signature(module.forward).parameters)


@functools.lru_cache(maxsize=64)
def language_model_name(module: torch.nn.Module) -> str | None:
    """Returns the name of the outermost part with the token embedding but no media.

    None if the model does not name its embedding, or no such part takes embeddings.
    """
    embedding = token_embedding(module)
    path = next((name for name, child in module.named_modules() if child is embedding and name), None)
    parts = [] if path is None else path.split(".")
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        function = getattr(module.get_submodule(name), "forward", None)
        parameters = {} if function is None else inspect.signature(function).parameters
        if "inputs_embeds" in parameters and not any(_MEDIA.fullmatch(each) for each in parameters):
            return name
    return None


def language_model_inputs(
    program: ModelProgram, weights: Weights, inputs: dict[str, Any], spec: CallSpec
) -> dict[str, jax.Array]:
    """Runs the forward up to the call of its language model; to be traced.

    Args:
        program: The model.
        weights: Weights by name.
        inputs: Arrays of one row by argument of the forward.
        spec: The static arguments.

    Returns:
        ``embeds`` float[len, width], the embeddings with features in place; ``is_media`` bool[len], whether they are
        others than those of the tokens; ``is_of_text`` bool[], if the language model gets more tensors, whether they
        are those of the tokens without images; ``deepstack`` float[layers, n, width], what the first layers add to
        the n tokens with features, if they do; ``visible `` and a kind of layers bool[len, len],
        which keys queries see in them, if not all masks are known to be causal; and deferred checks of the model's
        code.

    Raises:
        UnsupportedModelError: the language model gets more than that, or what no embedding has returned.
    """
    kwargs = {**without_constants(torch_view(inputs)), **as_tensors(dict(spec.static_args))}
    if program.accepts("use_cache"):
        kwargs["use_cache"] = False
    with _stopped_forward(program, weights) as stopped, deferred_checks.collect() as met:
        found, embedded = stopped(kwargs)
        same = None
        if further := _further(found):
            # What is the same without images is what later forwards compute of the tokens (inputs of Gemma 4's layers).
            of_text, _ = stopped({key: value for key, value in kwargs.items() if not _is_media(key)})
            same = _are_equal({key: found.pop(key) for key in further}, of_text)
        name = language_model_name(program.module)
        assert name is not None
        language_model = program.module.get_submodule(name)
        fields = _captured(found, embedded, adds_deepstack=hasattr(language_model, _ADD_DEEPSTACK))
        fields |= {} if same is None else {"is_of_text": same}
        return fields | ({CHECKS: jnp.stack(met)} if met else {})


@contextlib.contextmanager
def _stopped_forward(
    program: ModelProgram, weights: Weights
) -> Iterator[Callable[[dict[str, Any]], tuple[dict[str, Any], list[Any]]]]:
    """Yields the forward up to its language model: that one's inputs and embeddings.

    Raises:
        UnsupportedModelError: there is no such call.
    """
    module = program.module
    name, embedding = language_model_name(module), token_embedding(module)
    if name is None or embedding is None:
        raise UnsupportedModelError("no part of the model takes embeddings and no images")
    language_model, embedded = module.get_submodule(name), []
    signature, attention = inspect.signature(type(language_model).forward), attention_name(module)

    def stop(owner: torch.nn.Module, *args: Any, **given: Any) -> None:
        raise _Reached(signature.bind(owner, *args, **given).arguments)

    def embed(owner: torch.nn.Module, *args: Any, **given: Any) -> Any:
        embedded.append(type(owner).forward(owner, *args, **given))
        return embedded[-1]

    def stopped(kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        embedded.clear()
        try:
            program.run(weights, kwargs, attention)
        except _Reached as reached:
            given = {key: value for key, value in reached.given.items() if value is not None and key != "self"}
            return given | given.pop("kwargs", {}), list(embedded)
        raise UnsupportedModelError("its forward does not call its language model")

    replacements = [(language_model, "forward", stop), (embedding, "forward", embed)]
    # What the model's code changes of itself is told from these replacements, which are none of the model.
    with program.watch.running(), replaced_methods(replacements), constant_folding.enabled():
        yield stopped


def _is_media(name: str) -> bool:
    return name not in _TEXT and (name == _ENCODED or _MEDIA.fullmatch(name) is not None)


def _further(given: Mapping[str, Any]) -> list[str]:
    """Returns the names of a language model's further tensors, apart from Qwen3-VL's."""
    known = {*_TEXT, _DEEPSTACK, _DEEPSTACK_MASK}
    return sorted(key for key, value in given.items() if key not in known and _has_tensor(value))


def _are_equal(values: Mapping[str, Any], of_text: Mapping[str, Any]) -> jax.Array:
    """Returns bool[], whether the tensors are those of a forward without images."""
    equal = []
    for key, value in values.items():
        mine, theirs = ([jax_view(as_views(leaf)) for leaf in _tensors(of)] for of in (value, of_text.get(key)))
        if [array.shape for array in mine] != [array.shape for array in theirs]:
            raise UnsupportedModelError(f"its language model gets {', '.join(sorted(values))} of images")
        equal += [(one == other).all() for one, other in zip(mine, theirs, strict=True)]
    return jnp.stack(equal).all()


def _captured(given: dict[str, Any], embedded: list[Any], *, adds_deepstack: bool) -> dict[str, jax.Array]:
    embeds = given.get("inputs_embeds")
    own = next((each for each in embedded if embeds is not None and each.shape == embeds.shape), None)
    if embeds is None or own is None:
        raise UnsupportedModelError("its language model gets embeddings that are not those of tokens")
    deepstack = [as_views(part) for part in given.pop(_DEEPSTACK, None) or ()]
    given.pop(_DEEPSTACK_MASK, None)
    if deepstack and not adds_deepstack:
        raise UnsupportedModelError(f"its language model adds {_DEEPSTACK} in a way of its own")
    embeds, own = jax_view(as_views(embeds)), jax_view(as_views(own))
    fields = {"embeds": embeds[0], "is_media": (embeds[0] != own[0]).any(-1)}
    if deepstack:
        fields["deepstack"] = jnp.stack([jax_view(part) for part in deepstack])
    mask = given.get("attention_mask")
    masks = mask if isinstance(mask, dict) else {"": mask}
    masks = {kind: each for kind, each in masks.items() if each is not None and each.ndim == 4}
    if any(getattr(each, "causal_mask", None) is None for each in masks.values()):
        fields |= {VISIBLE + kind: _as_visible(jax_view(as_views(each)))[0, 0] for kind, each in masks.items()}
    return fields


def _as_visible(mask: jax.Array) -> jax.Array:
    return mask if mask.dtype == jnp.bool else mask == 0


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _has_tensor(value: Any) -> bool:
    return bool(_tensors(value))


@contextlib.contextmanager
def features_in_place(program: ModelProgram, media: MediaTokens | None) -> Iterator[None]:
    """Puts features in place of placeholder embeddings inside the context; None: of none."""
    module = program.module
    embedding = token_embedding(module)
    if media is None or embedding is None:
        yield
        return

    index, width = media.index, media.features.shape[1]

    def rows(begin: int, end: int) -> Any:
        chosen = media.features[jnp.maximum(index, 0), begin:end]
        return jnp.where((index >= 0)[:, None], chosen, 0)

    def embed(owner: torch.nn.Module, *args: Any, **given: Any) -> Any:
        own = jax_view(as_views(type(owner).forward(owner, *args, **given)))
        if own.ndim != 3 or own.shape[1] != index.shape[0]:
            return torch_view(own)  # another table of the same module
        placed = rows(0, own.shape[2]).astype(own.dtype)
        return torch_view(jnp.where((index >= 0)[None, :, None], placed[None], own))

    replacements: list[Any] = [(embedding, "forward", embed)]
    size = getattr(embedding, "embedding_dim", width)
    if width > size:
        replacements += _deepstack_in_place(module, [rows(begin, begin + size) for begin in range(size, width, size)])
    with program.watch.running(), replaced_methods(replacements):
        yield


def _deepstack_in_place(module: torch.nn.Module, parts: list[jax.Array]) -> list[Any]:
    """Returns replacements of methods by which first layers add `parts`, float[T, width]."""
    name = language_model_name(module)
    assert name is not None
    language_model = module.get_submodule(name)

    def forward(owner: torch.nn.Module, *args: Any, **given: Any) -> Any:
        of_all = torch_view(jnp.ones((1, len(parts[0])), bool))
        given |= {_DEEPSTACK: [torch_view(part) for part in parts], _DEEPSTACK_MASK: of_all}
        return type(owner).forward(owner, *args, **given)

    def add(owner: torch.nn.Module, hidden_states: Any, mask: Any, features: Any) -> Any:
        return hidden_states + features.to(hidden_states.dtype)[None]

    return [(language_model, "forward", forward), (language_model, _ADD_DEEPSTACK, add)]
