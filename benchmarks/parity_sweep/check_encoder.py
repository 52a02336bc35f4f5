"""Check of a tiny random encoder or classifier against eager PyTorch.

It runs on one text, and on a batch of several.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from model_adapters.errors import UnsupportedModelError
from parity_sweep.check_causal import TOLERANCE
from parity_sweep.tiny.config import SPECIAL_IDS, tiny_config
from parity_sweep.tiny.models import MAX_ROUNDING, prompts, random_model
from torchax_serve.entrypoints.serve import serve
from torchax_serve.parity.result import PASSED, Result, error_line
from torchax_serve.pooling.classification import text_logits

SEEDS = (0, 9, 3)

Outputs = Callable[[Any, torch.Tensor], torch.Tensor]


def check_encoder(model_type: str) -> Result:
    """Checks the base model of one type; errors are stored in the result."""
    by_type: dict[str, Any] = dict(modeling_auto.MODEL_MAPPING_NAMES)
    by_type.update(modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES)
    name = by_type[model_type]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    return checked_encoder(model_type, model_class, lambda: tiny_config(model_type, as_decoder=False))


def checked_encoder(name: str, model_class: type[PreTrainedModel], config: Callable[[], PreTrainedConfig]) -> Result:
    """Checks a base model of `config`, which is called for each try; `name` names the result."""
    return _checked(name, model_class, config, _hidden, _embeddings, _mean)


def checked_classifier(name: str, model_class: type[PreTrainedModel], config: Callable[[], PreTrainedConfig]) -> Result:
    """Checks a sequence classifier of `config`; arguments as for `checked_encoder`."""
    return _checked(name, model_class, config, _logits, _classified, lambda logits: logits[0])


def check_classifier(model_type: str) -> Result:
    """Checks the classifier of one type."""
    model_class = getattr(transformers, modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[model_type])
    return checked_classifier(model_type, model_class, lambda: tiny_config(model_type, as_decoder=False))


def texts(config: PreTrainedConfig) -> list[list[int]]:
    """Returns token ids of three texts of different lengths.

    For a decoder they end with the end token that its classifier needs.
    """
    # Each token once: some code sorts by values computed per token, and the order of equal values is undefined.
    first, second = (list(dict.fromkeys(ids[0].tolist())) for ids in prompts())
    end = [config.eos_token_id] if config.is_encoder_decoder and isinstance(config.eos_token_id, int) else []
    return [[*ids, *end] for ids in (first, second, first[3:8])]


def _checked(
    name: str,
    model_class: type[PreTrainedModel],
    config: Callable[[], PreTrainedConfig],
    output: Outputs,
    of_batch: Callable[[Any], torch.Tensor],
    of_one: Callable[[torch.Tensor], torch.Tensor],
) -> Result:
    """Returns the result of the comparison of `output` of one text, and of a batch of texts.

    `of_batch` of the served model is compared with `of_one` of each text's output.
    """
    began = time.monotonic()
    result = Result(name, model_class.__name__)
    try:
        model, expected = _model(config, model_class, output)
    except UnsupportedModelError as error:
        return dataclasses.replace(result, status="impossible", error=str(error))
    errors: list[str] = []
    differences: list[float] = []
    with serve(model) as served:
        for which, function, wanted in (
            ("unbatched", lambda: output(served.torch_model, torch.tensor([texts(model.config)[0]])), expected[0]),
            ("batch", lambda: of_batch(served), torch.stack([of_one(each) for each in expected])),
        ):
            try:
                found = function()
                differences.append(float((found - wanted).abs().max()))
            except Exception as error:
                errors.append(f"{which}: {error_line(error)}")
    passed = not errors and max(differences) <= TOLERANCE
    if not passed and not errors:
        errors.append(f"differences unbatched and in a batch: {', '.join(f'{x:.0e}' for x in differences)}")
    return dataclasses.replace(
        result,
        status=PASSED if passed else "failed",
        forward_difference=max(differences, default=None),
        error="; ".join(errors) or None,
        total_s=round(time.monotonic() - began, 2),
    )


@torch.no_grad()
def _model(
    make_config: Callable[[], PreTrainedConfig], model_class: type[PreTrainedModel], output: Outputs
) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    """Builds a model that does not amplify rounding, with its eager outputs for each text.

    It is the first such model of a few.

    Raises:
        UnsupportedModelError: the model fails in PyTorch itself; with PyTorch's own error.
    """
    for seed in SEEDS:
        config = make_config()
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = SPECIAL_IDS["decoder_start"]
        if model_class.__name__.endswith("EncoderModel"):
            config.is_encoder_decoder = False
        model = random_model(model_class, config, seed)
        try:
            expected = [output(copy.deepcopy(model), torch.tensor([ids])) for ids in texts(model.config)]
            assert all(torch.isfinite(each).all() for each in expected), "outputs that are no numbers"
        except Exception as error:
            raise UnsupportedModelError(
                f"{model_class.__name__} fails in PyTorch itself: {error_line(error)}"
            ) from error
        try:
            exact = output(copy.deepcopy(model).double(), torch.tensor([texts(model.config)[0]]))
        except Exception:  # code that does not compute in float64
            break
        if float((exact - expected[0]).abs().max()) <= MAX_ROUNDING:
            break
    return model, expected


def _hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def _mean(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[0].mean(0)


def _embeddings(served: Any) -> torch.Tensor:
    return torch.from_numpy(served.embed(texts(served.config), pooling="mean"))


def _classified(served: Any) -> torch.Tensor:
    rows = [{"input_ids": ids} for ids in texts(served.config)]
    return torch.from_numpy(text_logits(served._head(), rows))
