"""Tiny random models with clear greedy choices, and their outputs in eager PyTorch."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model_adapters.errors import UnsupportedModelError
from parity_sweep.tiny.config import PROMPT_IDS_END, SPECIAL_IDS, tiny_config
from torchax_serve.parity.result import error_line

NUM_NEW = 16
PROMPT_LENS = (14, 9)
FIRST_PROMPT_ID = 5
CLEAR_GAP = 0.02
"""Smallest gap between the two largest logits of a clear greedy choice: two hundred times the tolerance of a logit."""
NUM_SEEDS = 9
FIRST_UNTIED = 6
"""First seed whose head is not tied to the embedding: with a tied head some types only repeat a token."""
EMBEDDING_STDS = (0.4, 0.1, 0.03)
"""Standard deviations of embeddings by seed: many models scale them, and repeating the last token checks little."""
MIN_DISTINCT = 4
"""Smallest number of different tokens in an answer that checks enough."""
GAINS = (1.4, 3.0, 3.0, 2.0, 2.0, 2.0)
"""Gains of products; each is used for three seeds."""
MAX_ROUNDING = 2e-5
"""Largest rounding error of a logit in float32: a fifth of the tolerance."""
NUM_PERTURBATIONS = 8
"""Number of perturbed weights tried to see how much a model amplifies rounding."""
NOISE_STD = 0.1
"""Standard deviation of the noise added to biases and scales."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """Outputs of eager PyTorch.

    Attributes:
        logits: Logits of the first prompt, float32[1, prompt_len, vocab].
        padded: New tokens of both prompts in one batch, the shorter padded on the left, int64[2, NUM_NEW]; None if
            transformers raises.
        unbatched: New tokens of each prompt by itself, int64[1, NUM_NEW].
        smallest_gap: Smallest gap between the first and the second logit of a greedy choice.
        options: Further arguments of ``generate`` that eager PyTorch needed.
        notes: Calls that fail in transformers.
        rounding: Rounding error of the logits (`rounding_error`); large if the model amplifies rounding.
    """

    logits: torch.Tensor
    padded: torch.Tensor | None
    unbatched: tuple[torch.Tensor, ...]
    smallest_gap: float
    options: dict[str, Any]
    notes: tuple[str, ...]
    rounding: float = 0.0

    @property
    def num_distinct(self) -> int:
        """Number of different tokens in the less varied answer."""
        return min(len(set(tokens[0].flatten().tolist())) for tokens in self.unbatched)

    @property
    def prompts_differ(self) -> bool:
        """Whether the prompts have different answers."""
        return not torch.equal(*self.unbatched)

    @property
    def has_margins(self) -> bool:
        """Whether the choices are clear and differ from prompt to prompt."""
        if self.rounding > MAX_ROUNDING:
            return False
        return self.prompts_differ and self.smallest_gap >= CLEAR_GAP and self.num_distinct >= MIN_DISTINCT


def prompts() -> tuple[torch.Tensor, ...]:
    """Returns prompts int64[1, len] of different lengths that share no prefix."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(FIRST_PROMPT_ID, PROMPT_IDS_END, (1, n), generator=generator) for n in PROMPT_LENS)


def padded_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns input_ids and attention_mask, int64[2, len], of the prompts in one batch.

    Padding is on the left.
    """
    length = max(PROMPT_LENS)
    ids, mask = torch.zeros(2, length, dtype=torch.long), torch.zeros(2, length, dtype=torch.long)
    for row, prompt in enumerate(prompts()):
        ids[row, length - prompt.shape[1] :] = prompt[0]
        mask[row, length - prompt.shape[1] :] = 1
    return ids, mask


def causal_class(model_type: str) -> type[PreTrainedModel]:
    """Returns the class that transformers maps `model_type` to as a causal language model."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Builds a tiny causal model; see `random_model`."""
    return random_model(causal_class(model_type), tiny_config(model_type), seed)


def random_model(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    seed: int = 0,
    gains: tuple[float, ...] = GAINS,
) -> PreTrainedModel:
    """Builds a model in float32 with random weights and eager attention.

    `gains` are those of products, by seed.

    Raises:
        UnsupportedModelError: transformers cannot build it; with its reason.
    """
    config = _config_for(model_class, config)
    if seed >= FIRST_UNTIED:
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    torch.manual_seed(seed)
    try:
        model = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    except Exception as error:
        raise UnsupportedModelError(
            f"transformers cannot build {model_class.__name__} from a configuration: {error_line(error)}"
        ) from error
    _spread(model, EMBEDDING_STDS[seed % len(EMBEDDING_STDS)], gains[min(seed // len(EMBEDDING_STDS), len(gains) - 1)])
    if not model.can_generate():
        return model
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    if num_codebooks(model) > 1:  # the code behind the last stands where a pattern of delays has none
        model.generation_config.decoder_start_token_id = model.generation_config.pad_token_id = model.config.vocab_size
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = SPECIAL_IDS["decoder_start"]
    return model


def _config_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns `config`, or the part of it that `model_class` is built from."""
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    parts = [part for part in vars(config).values() if isinstance(part, wanted)]
    return parts[0] if parts else config


@torch.no_grad()
def _spread(model: PreTrainedModel, embedding_std: float, gain: float) -> None:
    """Scales weights so that the layers' outputs outweigh the token's own embedding.

    No bias is zero afterwards.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                continue
            if isinstance(module, torch.nn.Embedding):
                parameter.normal_(std=embedding_std)
            elif parameter.ndim > 1 and _is_product(module, name):
                parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
            elif parameter.ndim == 1 and name in ("weight", "bias"):
                parameter.add_(torch.randn_like(parameter), alpha=NOISE_STD)
            elif (
                not parameter.any()
            ):  # the values that it scales would be equal, and the order of equal values is undefined
                parameter.normal_(std=NOISE_STD)


def _is_product(module: torch.nn.Module, name: str) -> bool:
    """Returns whether the parameter is a matrix.

    Others are rates and scales that must stay in their range.
    """
    known = isinstance(module, (torch.nn.Linear, torch.nn.Conv1d)) or type(module).__name__ == "Conv1D"
    return known or name.endswith("_proj") or name in ("weight", "kernel")


def model_with_margins(model_type: str) -> tuple[PreTrainedModel, Expected]:
    """Returns a tiny causal model with clear greedy choices, and its eager outputs.

    They are fixed for a type.
    """
    return clearest(functools.partial(tiny_model, model_type), expect)


def clearest(
    make: Callable[[int], PreTrainedModel],
    expect: Callable[[PreTrainedModel], Expected],
    seeds: Sequence[int] = range(NUM_SEEDS),
) -> tuple[PreTrainedModel, Expected]:
    """Returns the model of the first seed whose greedy choices are clear, and its outputs.

    If there is none, it is the model with the widest gap.

    Args:
        make: Builds a model from a seed.
        expect: Computes the outputs of a model in eager PyTorch.
        seeds: Seeds, in the order in which they are tried.
    """
    best: tuple[PreTrainedModel, Expected] | None = None
    for seed in seeds:
        model = make(seed)
        expected = expect(model)
        if expected.has_margins:
            return model, expected
        if best is None or _quality(expected) > _quality(best[1]):
            best = model, expected
    assert best is not None
    return best


def _quality(expected: Expected) -> tuple[int, bool, bool, int, float]:
    varied = min(expected.num_distinct, MIN_DISTINCT)
    return (
        -max(1, math.ceil(expected.rounding / MAX_ROUNDING)),
        expected.prompts_differ,
        expected.smallest_gap >= CLEAR_GAP / 10,
        varied,
        expected.smallest_gap,
    )


@torch.no_grad()
def expect(model: PreTrainedModel) -> Expected:
    """Computes the outputs of eager PyTorch.

    Each is computed on a copy: some models change their own state in a call.

    Raises:
        UnsupportedModelError: the forward itself fails in PyTorch; with PyTorch's own error.
    """
    first = prompts()[0]
    try:
        logits = _forward(copy.deepcopy(model), rows_of(model, first))
        assert torch.isfinite(logits).all(), "logits that are no numbers"
    except Exception as error:
        raise UnsupportedModelError(
            f"the forward of {type(model).__name__} fails in PyTorch itself: {error_line(error)}"
        ) from error
    notes: list[str] = []
    options: dict[str, Any] = {}
    if num_codebooks(model) > 1:
        options = {"num_return_sequences": 1, "num_beams": 1}  # for which its generate has no defaults
    try:
        unbatched = [greedy(model, prompt, torch.ones_like(prompt), options) for prompt in prompts()]
    except Exception as error:
        notes.append(f"eager generate with a cache raises {error_line(error)}; compared without one")
        options |= {"use_cache": False}
        try:
            unbatched = [greedy(model, prompt, torch.ones_like(prompt), options) for prompt in prompts()]
        except Exception as second:
            raise UnsupportedModelError(f"eager generate raises {error_line(second)}") from second
    gaps = [gap for _, gap in unbatched]
    padded = None
    try:
        if num_codebooks(model) > 1:
            notes.append("a pattern of delays begins with a batch, and not with a row; no padded batch is compared")
        else:
            padded, gap = greedy(model, *padded_batch(), options)
            gaps.append(gap)
    except Exception as error:
        notes.append(f"eager generate on a padded batch raises {error_line(error)}; not compared")
    rounding = rounding_error(model, lambda exact: _forward(exact, rows_of(model, first)), logits)
    tokens = tuple(tokens for tokens, _ in unbatched)
    return Expected(logits, padded, tokens, min(gaps), options, tuple(notes), rounding)


def rounding_error(model: PreTrainedModel, forward: Callable[[Any], torch.Tensor], logits: torch.Tensor) -> float:
    """Returns the largest difference of `logits` to those in float64.

    Some code does not compute in float64, or gives NaN there because masks of its smallest number add up to minus
    infinity. Then the result is the largest difference to logits of weights perturbed in their last bit, over
    `NUM_PERTURBATIONS` perturbations: a single one may miss what is amplified.
    """
    try:
        exact = forward(copy.deepcopy(model).double())
    except Exception:  # grouped products have no float64, and some code writes float32 down
        exact = torch.full_like(logits, torch.nan)
    if torch.isfinite(exact).all():
        others = [exact]
    else:
        others = [forward(_perturb_last_bit(model, seed)) for seed in range(NUM_PERTURBATIONS)]
    return max(float((other - logits).abs().max()) for other in others)


@torch.no_grad()
def _perturb_last_bit(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    perturbed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in perturbed.parameters():
        if parameter.is_floating_point():
            direction = torch.randn(parameter.shape, generator=generator) * torch.inf
            parameter.copy_(torch.nextafter(parameter, direction))
    return perturbed


def num_codebooks(model: Any) -> int:
    """Returns how many rows of audio codes form one sequence of `model`; 1 for text."""
    return int(getattr(model, "num_codebooks", 1))


def rows_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns the rows int64[num_codebooks, len] that `model` reads for a sequence.

    The sequence is int64[1, len].
    """
    return torch.cat([ids.roll(row, 1) for row in range(num_codebooks(model))])


def _forward(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits


def greedy(
    model: PreTrainedModel, ids: torch.Tensor | None, mask: torch.Tensor | None, options: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    """Generates greedily on a copy of `model`.

    Returns:
        New tokens int64[batch, (codebooks,) NUM_NEW], and the smallest gap between the two largest logits of a step.
    """
    eager: Any = copy.deepcopy(model)
    if ids is not None and num_codebooks(model) > 1:
        ids = rows_of(model, ids)
        mask = torch.ones_like(ids)
    given = {"attention_mask": mask} if mask is not None else {}
    output = eager.generate(
        *([] if ids is None else [ids]),
        **given,
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    top = torch.stack([step.topk(2, -1).values for step in output.logits])
    return output.sequences[..., -NUM_NEW:], float((top[..., 0] - top[..., 1]).min())
