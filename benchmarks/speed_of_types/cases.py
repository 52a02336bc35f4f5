"""The types that are measured: their models, what they are asked, and of which kind they are."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from parity_sweep.tiny.audio import CONFIGS as AUDIO_CONFIGS
from parity_sweep.tiny.audio import audio_inputs, is_audio_type
from parity_sweep.tiny.config import SPECIAL_IDS, config_of_two, is_of_two, tiny_config
from parity_sweep.tiny.images import image_config, image_text_class, inputs_of
from parity_sweep.tiny.media_prompts import batched
from parity_sweep.tiny.models import _config_for, causal_class, num_codebooks
from speed_of_types.sizes import enlarged
from torchax_serve.parity.result import Result
from torchax_serve.parity.tasks import TASKS, shipped

PROMPT_LEN, NEW_TOKENS = 64, 32
FIRST_ID, LAST_ID = 200, 4000
"""Ids of prompts, all of them in the vocabulary and none of them special, also in a small model."""
TASK_NAMES = ("causal", "seq2seq", "speech", "images")
PREFERRED = ("seq2seq", "speech", "causal", "images")
"""Tasks by what is meant where a type is named without one: an encoder-decoder rather than its decoder alone."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")

_WITH_IMAGES = frozenset(
    ("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "llama4", "pix2struct", "pp_formulanet", "udop")
)
"""Image types whose ``generate`` needs an image."""
_MEDIA = ("pixel_values", "input_features", "input_values")

Inputs = dict[str, Any]


@functools.cache
def _results(task: str) -> dict[str, Result]:
    return shipped(task, transformers.__version__)[1]


@dataclasses.dataclass(frozen=True)
class TypeCase:
    """A model type of a task of parity."""

    task: str
    model_type: str

    @property
    def name(self) -> str:
        """Its name among the types of all tasks."""
        return f"{self.task}:{self.model_type}"

    @property
    def executor(self) -> str:
        """The executor that parity has found for it."""
        result = _results(self.task).get(self.model_type)
        return (result and result.executor) or "none"

    def impossible(self) -> str | None:
        """Why PyTorch itself cannot run it; None if it can."""
        result = _results(self.task).get(self.model_type)
        return result.error or "" if result is not None and result.status == "impossible" else None

    def kind(self) -> str:
        """One of `speed_of_types.kinds.KINDS`."""
        if self.task in ("speech", "images"):
            return {"speech": "speech", "images": "media"}[self.task]
        result = _results(self.task).get(self.model_type)
        caches = set(result.cache_kinds) if result is not None else set()
        try:
            config = _config_for(self.model_class(), self.tiny())
        except Exception:  # a configuration that cannot be built has a row that says so
            return "dense"
        text = config.get_text_config(decoder=True)
        if is_audio_type(self.model_type) or (self.task == "seq2seq" and "input_features" in _arguments(self)):
            return "speech"
        if config.is_encoder_decoder and self.task == "seq2seq":
            return "encoder-decoder"
        if "state" in caches or self.model_type in ("rwkv", "xlstm", "recurrent_gemma"):
            return "recurrent" if caches <= {"state"} else "hybrid"
        parts = [text, *(part for part in vars(text).values() if isinstance(part, PreTrainedConfig))]
        if getattr(text, "kv_lora_rank", None):
            return "latent"
        if any(_number(getattr(part, name, 0)) > 1 for part in parts for name in _EXPERTS):
            return "experts"
        return "dense" if self.executor == "packed" else "per-sequence"

    def model_class(self) -> type[PreTrainedModel]:
        """The class that parity checks."""
        if self.task == "causal":
            return causal_class(self.model_type)
        if self.task == "images":
            return image_text_class(self.model_type)
        of_task = {
            "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        }
        return getattr(transformers, of_task[self.task][self.model_type])

    def tiny(self) -> PreTrainedConfig:
        """The configuration that parity checks."""
        if self.task == "causal":
            return tiny_config(self.model_type)
        if self.task == "images":
            return image_config(self.model_type)
        if is_of_two(self.model_type):
            encoder = "wav2vec2" if self.task == "speech" else "bert"
            return config_of_two(self.model_type, tiny_config(encoder, as_decoder=False))
        return tiny_config(self.model_type, as_decoder=False, overrides=AUDIO_CONFIGS.get(self.model_type, {}))

    def model(self, dtype: str, *, is_small: bool = False) -> PreTrainedModel:
        """A random model in evaluation mode that never ends a sequence by itself."""
        torch.manual_seed(0)
        model_class = self.model_class()
        config = _config_for(model_class, enlarged(self.tiny(), is_small=is_small))
        model = model_class._from_config(config, dtype=getattr(torch, dtype)).eval()
        if model.can_generate():
            options = model.generation_config
            options.pad_token_id, options.eos_token_id, options.do_sample = 0, None, False
            if model.config.is_encoder_decoder and options.decoder_start_token_id is None:
                options.decoder_start_token_id = SPECIAL_IDS["decoder_start"]
        return model

    def reads_text(self) -> bool:
        """Whether its prompt is text; else its input has sound, or an image where there is no text."""
        if self.task == "speech" or is_audio_type(self.model_type):
            return False
        if self.task == "images" and self.model_type in _WITH_IMAGES:
            return False
        return "input_ids" in _arguments(self)

    def inputs(self, model: PreTrainedModel, num_requests: int) -> Iterator[Inputs]:
        """Yields arguments of ``generate`` for that many requests, other numbers in each."""
        random = torch.Generator().manual_seed(0)
        if self.reads_text():
            assert num_codebooks(model) == 1, "codes of sound as tokens, in several rows for a sequence"
            while True:
                ids = torch.randint(FIRST_ID, LAST_ID, (num_requests, PROMPT_LEN), generator=random)
                yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        first = self._media(model)
        for _ in itertools.count():
            rows = [_other(first, random, model.dtype) for _ in range(num_requests)]
            yield rows[0] if num_requests == 1 else batched(rows)

    def _media(self, model: PreTrainedModel) -> Inputs:
        if self.task == "images":
            return inputs_of(model, self.model_type, 0)
        as_float = copy.deepcopy(model).float() if model.dtype != torch.float32 else model
        return audio_inputs(self.model_type, as_float)["first"]


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _arguments(case: TypeCase) -> set[str]:
    import inspect

    return set(inspect.signature(case.model_class().forward).parameters)


def _other(inputs: Inputs, random: torch.Generator, dtype: torch.dtype) -> Inputs:
    """The same with another image or sound, in the model's dtype."""
    found = dict(inputs)
    for name, value in inputs.items():
        if name in _MEDIA:
            found[name] = torch.randn(value.shape, generator=random).to(dtype)
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            found[name] = value.to(dtype)
    return found


def named(cases: Sequence[TypeCase], names: Sequence[str]) -> list[TypeCase]:
    """Those of the cases that are named, by type or by "task:type".

    Raises:
        ValueError: a name that none of them has.
    """
    found = []
    for name in names:
        task, _, model_type = name.rpartition(":")
        those = [case for case in cases if case.model_type == model_type and task in ("", case.task)]
        if not those:
            raise ValueError(f"expected a model type of transformers that generates, got {name!r}")
        found.append(min(those, key=lambda case: PREFERRED.index(case.task)))
    return found


def all_cases() -> list[TypeCase]:
    """Every type once for each task that it belongs to, in the order of the tasks."""
    found: dict[str, TypeCase] = {}
    for task in TASK_NAMES:
        for model_type in TASKS[task].types():
            case = TypeCase(task, model_type)
            if task == "speech" and f"seq2seq:{model_type}" in found:
                del found[f"seq2seq:{model_type}"]  # the same model, asked with sound
            found[case.name] = case
    return list(found.values())
