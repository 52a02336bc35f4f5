"""A model on JAX against itself in eager PyTorch, number by number: what ``torchax-serve verify`` shows.

Both sides run the same weights on the same prompt. Compared are the hidden states of a whole prompt, layer by layer,
those of one more token that reads the cache, the logits of every step of ``generate``, and the greedy tokens. The first
layer beyond the tolerance is where a fault sits: what comes after it has inherited the difference.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from transformers import PreTrainedModel

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel, load_model
from model_adapters.loading.sink import one_load
from torchax_serve.compile_cache import enable_compile_cache
from torchax_serve.drop_in import JaxModel, attach
from torchax_serve.eager_twin import EagerTwin
from torchax_serve.runtime import Runtime

TOLERANCES = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
"""Default tolerance by dtype, in the measure of `Difference.relative`. Two orders of summation in float32 stay below
1e-5 on models of a few dozen layers; half precision is a few rounding errors (2^-9, 2^-12) per layer."""

DEFAULT_PROMPT = "The quick brown fox jumps over the lazy dog. One, two, three, four: what comes next, and why? "
RANDOM_PROMPT_LEN = 24  # tokens, for a model without a tokenizer


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor of the JAX model is from that of eager PyTorch.

    Attributes:
        name: what the tensor is.
        largest: max of ``|jax - eager|``; infinite where a shape differs or a number is not finite on one side alone.
        relative: max of ``|jax - eager| / (|eager| + rms(eager))``, which neither a channel of huge values nor a value
            near zero dominates.
        within: whether `relative` is at most the tolerance.
    """

    name: str
    largest: float
    relative: float
    within: bool

    @classmethod
    def between(cls, name: str, ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> Difference:
        """Compares two tensors of one meaning, in float64."""
        a, b = ours.detach().double().numpy(), theirs.detach().double().numpy()
        if a.shape != b.shape:
            return cls(name, math.inf, math.inf, False)
        finite = np.isfinite(b)
        rms = float(np.sqrt(np.mean(b[finite] ** 2))) if finite.any() else 0.0
        same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities (masked logits) are equal to themselves
        with np.errstate(invalid="ignore", divide="ignore"):
            gap = np.where(same, 0.0, np.abs(a - b))
            gap = np.where(np.isnan(gap), np.inf, gap)
            relative = np.where(gap > 0, gap / (np.where(finite, np.abs(b), 0.0) + rms), 0.0)
        largest, highest = float(gap.max(initial=0.0)), float(relative.max(initial=0.0))
        return cls(name, largest, highest, highest <= tolerance)


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        model, architecture, dtype, device: what ran, and where JAX ran it.
        eager_weights: where the eager side had its weights from.
        tolerance: on `Difference.relative`.
        prompt_ids: the prompt.
        prompt: embedding, layers and logits of the whole prompt in one forward.
        cached_step: the same for the prompt's last token alone, behind a cache that holds the others; empty where the
            model has no cache.
        steps: logits of each step of greedy ``generate``, up to the first token that differs.
        tokens, eager_tokens: new tokens of both sides; empty for a model that does not generate.
        tie: in half precision, whether eager PyTorch's own logits of the two tokens that differ first are closer than
            the tolerance, so that rounding decides between them.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    eager_weights: str
    tolerance: float
    prompt_ids: tuple[int, ...]
    prompt: tuple[Difference, ...]
    cached_step: tuple[Difference, ...]
    steps: tuple[Difference, ...]
    tokens: tuple[int, ...]
    eager_tokens: tuple[int, ...]
    tie: bool

    @property
    def first_different_token(self) -> int | None:
        """Index of the first new token that differs; None if all are the same."""
        pairs = enumerate(zip(self.tokens, self.eager_tokens, strict=True))
        return next((index for index, (ours, theirs) in pairs if ours != theirs), None)

    @property
    def first_beyond(self) -> str | None:
        """The first place beyond the tolerance, in words; None if all is within it."""
        parts = (("whole prompt", self.prompt), ("cached step", self.cached_step), ("generate", self.steps))
        return next((f"{each.name} ({part})" for part, rows in parts for each in rows if not each.within), None)

    @property
    def passed(self) -> bool:
        """Whether every number is within the tolerance and the tokens are the same."""
        return self.first_beyond is None and (self.first_different_token is None or self.tie)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON has it; an infinite difference is the string ``"inf"``."""
        derived = ("first_beyond", "first_different_token", "passed")
        return _without_infinities(dataclasses.asdict(self) | {name: getattr(self, name) for name in derived})


def verify(
    model: str | os.PathLike[str] | PreTrainedModel | None = None,
    *,
    prompt: str | Sequence[int] | None = None,
    new_tokens: int = 16,
    dtype: str = "float32",
    tolerance: float | None = None,
    random_weights: bool = False,
    **load_options: Any,
) -> Verification:
    """Runs a model on JAX and in eager PyTorch and compares the two.

    The eager side reads the weights anew, by transformers' ``from_pretrained``, so that a fault in loading shows as
    well; with random weights or a model object both sides have the same ones.

    Args:
        model: as for `torchax_serve.serve`; a model object is eager again afterwards.
        prompt: text, or token ids; None for a text of ours, or random ids where there is no tokenizer.
        new_tokens: how many greedy tokens to compare; 0 for the forward alone.
        dtype: of weights and computation, on both sides; a model object keeps its own.
        tolerance: on `Difference.relative`; None for the one of `TOLERANCES`.
        random_weights: make the weights up, from the configuration alone.
        load_options: further arguments of `model_adapters.loading.load_model`.

    Raises:
        InvalidArgumentError: a prompt that is empty or not of this model, numbers out of range.
        UnsupportedModelError: an encoder-decoder model.
        TorchaxServeError: whatever loading has to say.
    """
    if new_tokens < 0:
        raise InvalidArgumentError(f"new_tokens is {new_tokens}, expected 0 or more")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise InvalidArgumentError(f"tolerance is {tolerance}, expected a number from 0 up")
    if isinstance(model, JaxModel):
        raise InvalidArgumentError("expected a model in eager PyTorch, got one that runs on JAX already; pass its name")
    enable_compile_cache()
    given = isinstance(model, PreTrainedModel)
    loaded = load_model(model, dtype="auto" if given else dtype, random_weights=random_weights, **load_options)
    if loaded.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(loaded.module).__name__} has an encoder and a decoder; verify compares models of a single stack"
        )
    ids = _prompt_ids(loaded, prompt)
    tolerance = TOLERANCES[str(loaded.dtype)] if tolerance is None else tolerance
    from_files = not given and not random_weights
    ours, (theirs, origin) = _run_both(loaded, ids, new_tokens, from_files=from_files)
    return _compared(loaded, ids, tolerance, ours, theirs, origin)


@dataclasses.dataclass(frozen=True)
class _Trace:
    """What one side computed; tensors on the CPU."""

    prompt: dict[str, torch.Tensor]
    cached_step: dict[str, torch.Tensor]
    step_logits: tuple[torch.Tensor, ...]  # float[1, vocab] per new token
    tokens: tuple[int, ...]


def _run_both(
    loaded: LoadedModel, ids: torch.Tensor, new_tokens: int, *, from_files: bool
) -> tuple[_Trace, tuple[_Trace, str]]:
    """The JAX side, then the eager side; weights that are read from files are held by one side at a time."""
    module, eager_class = loaded.module, type(loaded.module)
    is_object = loaded.source.kind == "object"
    twin = None if is_object or from_files else EagerTwin(loaded)
    try:
        # Nothing kept from earlier: what is compared is what the code computes now.
        runtime = Runtime(module, loaded.weights)
        on_jax = attach(module, runtime)
        # An encoder's code may name a cache as well, which only its decoder siblings use.
        cache_name = runtime.program.cache_name if runtime.caches.can_make and module.can_generate() else None
        ours = _trace(on_jax, ids, new_tokens, cache_name)
        del on_jax, runtime
    finally:
        module.__class__ = eager_class
        vars(module).pop("_jax_runtime", None)
    if is_object:
        return ours, (_trace(module, ids, new_tokens, cache_name), "those of the model object")
    if twin is not None:
        return ours, (_trace(twin.module, ids, new_tokens, cache_name), "random, the memory of the JAX arrays")
    loaded.weights.clear()
    with one_load():
        eager: Any = eager_class.from_pretrained(
            loaded.source.folder,
            config=loaded.config,
            dtype=getattr(torch, str(loaded.dtype)),
            local_files_only=True,
        )
    return ours, (_trace(eager.eval(), ids, new_tokens, cache_name), "read anew by from_pretrained")


def _prompt_ids(loaded: LoadedModel, prompt: str | Sequence[int] | None) -> torch.Tensor:
    """int64[1, len]."""
    embedding: Any = loaded.module.get_input_embeddings()
    vocab_size: int = embedding.num_embeddings
    tokenizer = loaded.tokenizer() if prompt is None or isinstance(prompt, str) else None
    if isinstance(prompt, str) and tokenizer is None:
        raise InvalidArgumentError(f"{loaded.source.name} has no tokenizer for a prompt of text; leave it out")
    if tokenizer is not None:
        ids = list(tokenizer(DEFAULT_PROMPT if prompt is None else prompt)["input_ids"])
    elif prompt is None:
        ids = np.random.default_rng(0).integers(0, vocab_size, RANDOM_PROMPT_LEN).tolist()
    else:
        ids = [int(token) for token in prompt]
    if not ids:
        raise InvalidArgumentError("the prompt is empty; give at least one token")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidArgumentError(
            f"the prompt has token ids from {min(ids)} to {max(ids)}, expected 0 to {vocab_size - 1}; "
            "encode it with this model's tokenizer"
        )
    return torch.tensor([ids], dtype=torch.long)


@torch.no_grad()
def _trace(model: Any, ids: torch.Tensor, new_tokens: int, cache_name: str | None) -> _Trace:
    """Runs one side: `model` is a transformers model, eager or on JAX."""
    whole = _tensors_of_output(model(input_ids=ids, output_hidden_states=True, return_dict=True))
    step: dict[str, torch.Tensor] = {}
    if cache_name is not None and ids.shape[1] > 1:
        first = model(input_ids=ids[:, :-1], use_cache=True, return_dict=True)
        kwargs = {cache_name: first[cache_name], "use_cache": True, "output_hidden_states": True, "return_dict": True}
        step = _tensors_of_output(model(input_ids=ids[:, -1:], **kwargs))
    if not new_tokens or not model.can_generate():
        return _Trace(whole, step, (), ())
    output = type(model).generate(  # not a repository's own, which may return anything
        model,
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,  # past the end of a text: the more tokens, the more is compared
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return _Trace(whole, step, tuple(output.logits), tuple(output.sequences[0, ids.shape[1] :].tolist()))


def _tensors_of_output(output: Any) -> dict[str, torch.Tensor]:
    """Hidden states by the name of the layer that made them, then the other floating-point tensors of `output`.

    transformers gives the output of the embedding and of each layer, the last one behind the final norm.
    """
    states = output.get("hidden_states") or ()
    last = len(states) - 1
    names = ["embedding", *(f"layer {index}" for index in range(last))][: last + 1]
    if last > 0:
        names[last] += " and final norm"
    found = dict(zip(names, states, strict=True))
    for name, value in output.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found[name.replace("_", " ")] = value
    return found


def _compared(
    loaded: LoadedModel, ids: torch.Tensor, tolerance: float, ours: _Trace, theirs: _Trace, origin: str
) -> Verification:
    def rows(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[Difference, ...]:
        absent = torch.empty(0)
        names = [*b, *(name for name in a if name not in b)]
        return tuple(Difference.between(each, a.get(each, absent), b.get(each, absent), tolerance) for each in names)

    pairs = zip(ours.tokens, theirs.tokens, strict=True)
    parted = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    # Behind the first different token the two sides continue different texts.
    num_steps = len(theirs.tokens) if parted is None else parted + 1
    logits = zip(ours.step_logits[:num_steps], theirs.step_logits[:num_steps], strict=True)
    steps = tuple(
        Difference.between(f"logits of new token {index}", a, b, tolerance) for index, (a, b) in enumerate(logits)
    )
    half = str(loaded.dtype) != "float32"
    tie = half and parted is not None and _is_tie(theirs, ours.tokens[parted], parted, tolerance)
    return Verification(
        model=loaded.source.name,
        architecture=type(loaded.module).__name__,
        dtype=str(loaded.dtype),
        device=jax.devices()[0].device_kind,
        eager_weights=origin,
        tolerance=tolerance,
        prompt_ids=tuple(ids[0].tolist()),
        prompt=rows(ours.prompt, theirs.prompt),
        cached_step=rows(ours.cached_step, theirs.cached_step),
        steps=steps,
        tokens=ours.tokens,
        eager_tokens=theirs.tokens,
        tie=tie,
    )


def _is_tie(theirs: _Trace, our_token: int, index: int, tolerance: float) -> bool:
    """Whether eager PyTorch's logits of its own token and of ours differ by less than the tolerance allows."""
    logits = theirs.step_logits[index][0].double()
    best, other = logits[theirs.tokens[index]], logits[our_token]
    rms = logits[logits.isfinite()].square().mean().sqrt()
    allowed = tolerance * ((best.abs() + rms) + (other.abs() + rms))
    return bool((best - other).abs() <= allowed)


def _without_infinities(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
