"""Comparison of a model on JAX with itself in eager PyTorch: ``torchax-serve verify``.

Both sides run the same weights on the same prompt. Compared are the hidden states of the full prompt, layer by layer,
those of one more token that reads the cache, the logits of every step of ``generate``, and the greedy tokens. The first
layer beyond the tolerance contains the fault: later layers inherit the difference.

In bfloat16 and float16 both sides round, each elsewhere, and how far that carries depends on the model. So eager
PyTorch runs the same weights in float32 as well, and the JAX model may be a few times as far from that as eager PyTorch
is in 16 bits.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel, load_model
from model_adapters.loading.weight_sink import exclusive_load
from torchax_serve.compilation.xla_cache import enable_compile_cache
from torchax_serve.generation.jax_model import JaxModelMixin, run_on_jax
from torchax_serve.parity.differences import ERROR_RATIO, Difference, Named, by_name, position_error, within
from torchax_serve.runtime.eager import EagerReference
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.tasks.checkpoint_readers import CheckpointFiles
from torchax_serve.tasks.plain_forward import inputs_of_noise

FLOAT32_TOLERANCE = 1e-4
"""Default tolerance in float32, on `Difference.relative`. Two orders of summation stay below 1e-5 on models of a few
dozen layers. In 16 bits no number does for all models, for real activations amplify rounding: the error of eager
PyTorch in the same dtype is the measure."""

DEFAULT_PROMPT = "The quick brown fox jumps over the lazy dog. One, two, three, four: what comes next, and why? "
RANDOM_PROMPT_LEN = 24  # tokens, for a model without a tokenizer


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
        model, architecture, dtype, device: Model that ran, and the device of JAX.
        eager_weights: Source of the eager side's weights.
        tolerance: on `Difference.relative`; None where the error of eager PyTorch in the same dtype is the measure, and
            differences are to eager float32.
        prompt_ids: Token ids of the prompt; empty for a model of images or sound.
        prompt: Differences of embedding, layers and logits for the full prompt in one forward.
        cached_step: The same for the prompt's last token, with a cache that holds the others; empty if the
            model has no cache.
        steps: logits of each step of greedy ``generate``, up to the first token that differs.
        tokens, eager_tokens: new tokens of both sides; empty for a model that does not generate.
        tie: in 16 bits, whether the logits of the two tokens that differ first are as close as eager PyTorch's rounding
            errors are large, so that rounding decides between them.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    eager_weights: str
    tolerance: float | None
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
        """First place beyond the tolerance, in words; None if all is within it."""
        parts = (("whole prompt", self.prompt), ("cached step", self.cached_step), ("generate", self.steps))
        return next((f"{each.name} ({part})" for part, rows in parts for each in rows if not each.within), None)

    @property
    def passed(self) -> bool:
        """Whether every number is within the tolerance and the tokens are the same."""
        return self.first_beyond is None and (self.first_different_token is None or self.tie)

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON types; an infinite difference is the string ``"inf"``."""
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
        prompt: text, or token ids; None for a text of ours, or random ids where there is no tokenizer, and noise for a
            model of images or sound.
        new_tokens: Number of greedy tokens to compare; 0 compares only the forward.
        dtype: of weights and computation, on both sides; a model object keeps its own.
        tolerance: on `Difference.relative`, both sides in `dtype`; None for `FLOAT32_TOLERANCE` in float32, and in 16
            bits for `ERROR_RATIO` times the error that eager PyTorch itself makes in `dtype`.
        random_weights: make the weights up, from the configuration alone.
        load_options: further arguments of `model_adapters.loading.load_model`.

    Raises:
        InvalidArgumentError: a prompt that is empty or not of this model, numbers out of range.
        UnsupportedModelError: an encoder-decoder model.
        TorchaxServeError: The model cannot be loaded.
    """
    if new_tokens < 0:
        raise InvalidArgumentError(f"new_tokens is {new_tokens}, expected 0 or more")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise InvalidArgumentError(f"tolerance is {tolerance}, expected a number from 0 up")
    if isinstance(model, JaxModelMixin):
        raise InvalidArgumentError("expected a model in eager PyTorch, got one that runs on JAX already; pass its name")
    enable_compile_cache()
    given = isinstance(model, PreTrainedModel)
    loaded = load_model(model, dtype="auto" if given else dtype, random_weights=random_weights, **load_options)
    if loaded.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(loaded.module).__name__} has an encoder and a decoder; verify compares models of a single stack"
        )
    inputs = _inputs(loaded, prompt)
    if tolerance is None and str(loaded.dtype) == "float32":
        tolerance = FLOAT32_TOLERANCE
    from_files = not given and not random_weights
    sides = _run_sides(loaded, inputs, new_tokens, from_files=from_files, in_float32=tolerance is None)
    ids = tuple(inputs["input_ids"][0].tolist()) if "input_ids" in inputs else ()
    return _compared(loaded, ids, tolerance, sides)


@dataclasses.dataclass(frozen=True)
class _LayerTrace:
    """Outputs of one side; tensors on the CPU."""

    prompt: dict[str, torch.Tensor]
    cached_step: dict[str, torch.Tensor]
    step_logits: tuple[torch.Tensor, ...]  # float[1, vocab] per new token
    tokens: tuple[int, ...]


class _Sides(NamedTuple):
    """Outputs of each side, and the source of eager PyTorch's weights."""

    ours: _LayerTrace
    theirs: _LayerTrace
    exact: _LayerTrace | None  # eager PyTorch in float32, on the tokens of `theirs`; None where a tolerance judges
    origin: str


def _run_sides(
    loaded: LoadedModel, inputs: Mapping[str, torch.Tensor], new_tokens: int, *, from_files: bool, in_float32: bool
) -> _Sides:
    """Runs the JAX side, then the eager sides; weights from files are held by one at a time."""
    module, eager_class = loaded.module, type(loaded.module)
    is_object = loaded.source.kind == "object"
    reference = None if is_object or from_files else EagerReference(loaded)
    try:
        # No program from an earlier process: the comparison is of what the code computes now.
        runtime = ModelRuntime(module, loaded.weights)
        on_jax = run_on_jax(module, runtime)
        # An encoder's code may name a cache as well, which only its decoder siblings use.
        cache_name = (
            runtime.program.cache_name if runtime.cache_support.is_supported and module.can_generate() else None
        )
        ours = _trace(on_jax, inputs, new_tokens, cache_name)
        del on_jax, runtime
    finally:
        module.__class__ = eager_class
        vars(module).pop("_jax_runtime", None)
    eager: Any = module
    if is_object:
        origin = "those of the model object"
    elif reference is not None:
        eager, origin = reference.module, "random, the memory of the JAX arrays"
    else:
        loaded.weights.clear()
        eager, origin = _load_again(loaded), "read anew by from_pretrained"
    theirs = _trace(eager, inputs, new_tokens, cache_name)
    exact = None
    if in_float32:
        widened = (copy.deepcopy(eager) if is_object else eager).float()
        exact = _trace(widened, inputs, new_tokens, cache_name, forced=theirs.tokens)
    return _Sides(ours, theirs, exact, origin)


def _load_again(loaded: LoadedModel) -> PreTrainedModel:
    """Loads the model in eager PyTorch from its files, in the dtype of `loaded`."""
    eager_class: Any = type(loaded.module)
    with exclusive_load():
        eager = eager_class.from_pretrained(
            loaded.source.folder,
            config=loaded.config,
            dtype=getattr(torch, str(loaded.dtype)),
            local_files_only=True,
        )
    return eager.eval()


def _inputs(loaded: LoadedModel, prompt: str | Sequence[int] | None) -> Mapping[str, torch.Tensor]:
    """Returns arguments of the forward: a prompt, or an image or sound of noise."""
    if loaded.module.main_input_name == "input_ids":
        return {"input_ids": _prompt_ids(loaded, prompt)}
    if prompt is not None:
        raise InvalidArgumentError(
            f"prompt: expected none for {type(loaded.module).__name__}, which reads {loaded.module.main_input_name}, "
            "got one; leave it out"
        )
    return inputs_of_noise(loaded.module, CheckpointFiles.of(loaded))


def _prompt_ids(loaded: LoadedModel, prompt: str | Sequence[int] | None) -> torch.Tensor:
    """Returns the prompt, int64[1, len]."""
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
def _trace(
    model: Any,
    inputs: Mapping[str, torch.Tensor],
    new_tokens: int,
    cache_name: str | None,
    *,
    forced: Sequence[int] = (),
) -> _LayerTrace:
    """Returns the trace of a transformers `model`, eager or on JAX; it must choose `forced`."""
    given = {name: each.to(model.dtype) if each.is_floating_point() else each for name, each in inputs.items()}
    prompt = _tensors_of_output(model(**given, output_hidden_states=True, return_dict=True))
    step: dict[str, torch.Tensor] = {}
    if (ids := inputs.get("input_ids")) is None:
        return _LayerTrace(prompt, step, (), ())
    if cache_name is not None and ids.shape[1] > 1:
        first = model(input_ids=ids[:, :-1], use_cache=True, return_dict=True)
        kwargs = {cache_name: first[cache_name], "use_cache": True, "output_hidden_states": True, "return_dict": True}
        step = _tensors_of_output(model(input_ids=ids[:, -1:], **kwargs))
    if not new_tokens or not model.can_generate():
        return _LayerTrace(prompt, step, (), ())
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
        logits_processor=[_Forced(ids.shape[1], forced)] if forced else None,
    )
    return _LayerTrace(prompt, step, tuple(output.logits), tuple(output.sequences[0, ids.shape[1] :].tolist()))


class _Forced(LogitsProcessor):
    """Logits processor that forces another side's tokens; reported logits stay unchanged."""

    def __init__(self, prompt_len: int, tokens: Sequence[int]) -> None:
        self._prompt_len, self._tokens = prompt_len, tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, -math.inf)
        chosen[:, self._tokens[input_ids.shape[1] - self._prompt_len]] = 0.0
        return chosen


def _tensors_of_output(output: Any) -> dict[str, torch.Tensor]:
    """Returns hidden states by layer name, then the other floating-point tensors of `output`.

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


def _compared(loaded: LoadedModel, ids: tuple[int, ...], tolerance: float | None, sides: _Sides) -> Verification:
    ours, theirs = sides.ours, sides.theirs
    pairs = zip(ours.tokens, theirs.tokens, strict=True)
    parted = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    # After the first different token the two sides continue different texts.
    num_steps = len(theirs.tokens) if parted is None else parted + 1
    ours = dataclasses.replace(ours, step_logits=ours.step_logits[:num_steps])
    if sides.exact is None:
        assert tolerance is not None
        parts = [within(tolerance, *each) for each in _pairs(ours, theirs)]
    else:
        parts = _judged_by_eager(ours, theirs, sides.exact)
    half = str(loaded.dtype) != "float32"
    return Verification(
        model=loaded.source.name,
        architecture=type(loaded.module).__name__,
        dtype=str(loaded.dtype),
        device=jax.devices()[0].device_kind,
        eager_weights=sides.origin,
        tolerance=tolerance,
        prompt_ids=ids,
        prompt=parts[0],
        cached_step=parts[1],
        steps=parts[2],
        tokens=ours.tokens,
        eager_tokens=theirs.tokens,
        tie=half and parted is not None and _is_tie(sides, parted, tolerance),
    )


def _pairs(a: _LayerTrace, b: _LayerTrace) -> tuple[tuple[Named, Named], ...]:
    """Pairs the tensors of two sides by name: prompt, cached step, and the steps that `a` has."""
    steps = [
        {f"logits of new token {index}": each for index, each in enumerate(side.step_logits[: len(a.step_logits)])}
        for side in (a, b)
    ]
    return (a.prompt, b.prompt), (a.cached_step, b.cached_step), (steps[0], steps[1])


def _judged_by_eager(ours: _LayerTrace, theirs: _LayerTrace, exact: _LayerTrace) -> list[tuple[Difference, ...]]:
    """Returns differences to float32, judged by those of eager PyTorch: prompt, step, steps.

    Rounding of one token may be lucky or unlucky. So the error allowed for a cached step is at least that of the full
    prompt, and the error of all steps together, like that of all positions of the prompt, is compared with eager
    PyTorch's; if it is beyond, the errors of single steps show which one.
    """
    errors = [
        {name: position_error(*pair) for name, pair in by_name(*each).items()}
        for each in _pairs(dataclasses.replace(theirs, step_logits=theirs.step_logits[: len(ours.step_logits)]), exact)
    ]
    prompt, cached, steps = errors
    of_all_steps = _rms(steps.values())
    allowed = [
        prompt,
        {name: max(error, prompt.get(name, 0.0)) for name, error in cached.items()},
        {name: max(error, of_all_steps) for name, error in steps.items()},
    ]
    found = [
        tuple(
            Difference.from_float32(name, *pair, allowed[part].get(name, 0.0)) for name, pair in by_name(*each).items()
        )
        for part, each in enumerate(_pairs(ours, exact))
    ]
    if _rms(step.error or 0.0 for step in found[2]) <= ERROR_RATIO * of_all_steps:
        found[2] = tuple(dataclasses.replace(step, within=True) for step in found[2])
    return found


def _rms(errors: Iterable[float]) -> float:
    squares = [error**2 for error in errors]
    return math.sqrt(sum(squares) / max(1, len(squares)))


def _is_tie(sides: _Sides, index: int, tolerance: float | None) -> bool:
    """Returns whether the logits of two tokens are so close that rounding may decide.

    By a tolerance eager PyTorch's own logits are compared; without one those of float32, with twice the largest error
    that eager PyTorch makes in 16 bits on a logit of this step.
    """
    eager = sides.theirs.step_logits[index][0].double()
    our_token, their_token = sides.ours.tokens[index], sides.theirs.tokens[index]
    if sides.exact is not None:
        exact = sides.exact.step_logits[index][0].double()
        errors = (eager - exact)[exact.isfinite() & eager.isfinite()].abs()
        return bool((exact[their_token] - exact[our_token]).abs() <= 2 * errors.max())
    assert tolerance is not None
    best, other = eager[their_token], eager[our_token]
    rms = eager[eager.isfinite()].square().mean().sqrt()
    allowed = tolerance * ((best.abs() + rms) + (other.abs() + rms))
    return bool((best - other).abs() <= allowed)


def _without_infinities(value: Any) -> Any:
    """Replaces infinities by strings: JSON has none."""
    if isinstance(value, dict):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
