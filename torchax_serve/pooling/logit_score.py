"""Scores of pairs by a model that generates: the logits of two tokens, such as yes and no.

The files are those of sentence-transformers' `CrossEncoder` with a module LogitScore, as Qwen3-Reranker has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model_adapters.errors import ChatTemplateError, CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.loading.modules_json import MODULES, modules_root, read_modules
from torchax_serve.pooling.text_rule import positive, read_json, texts_file
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text.generate_batch import complete_all
from torchax_serve.text.prompt import TextModel, encode_rendered, make_request
from torchax_serve.text.template_renderer import TemplateJob, shared_renderer

_OF_TEXTS = {"transformer_task", "modality_config", "module_output_name", "max_seq_length", "processing_kwargs"}
_OF_TEXTS |= {"do_lower_case", "unpad_inputs", "model_kwargs", "processor_kwargs"}
LogitsOf = Callable[[Sequence[Sequence[int]], int], np.ndarray]
_ACTIVATIONS = ("Sigmoid", "Identity")


@dataclasses.dataclass(frozen=True)
class LogitScoreRule:
    """Rule of how a pair becomes a prompt, and the logits behind it a score.

    Attributes:
        true_id: Token of a match.
        false_id: Token of none; None: the logit of a match is the score.
        activation: What is applied to the difference of their logits, or that logit: ``Sigmoid`` or ``Identity``.
        instruction: Text of the system message; empty for none.
        in_parts: Whether contents of messages are lists of parts.
        variables: Variables of the chat template.
        max_len: Most tokens of a prompt; None follows the model.
    """

    true_id: int
    false_id: int | None
    activation: str = "Sigmoid"
    instruction: str = ""
    in_parts: bool = False
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_len: int | None = None


def has_logit_score(folder: Path | None) -> bool:
    """Returns whether ``modules.json`` of the checkpoint in `folder` has a LogitScore."""
    root = None if folder is None else modules_root(folder)
    return root is not None and any(each.type.endswith(".LogitScore") for each in read_modules(root / MODULES))


def logit_score_rule(folder: Path) -> LogitScoreRule:
    """Reads the rule from the checkpoint in `folder`, for which `has_logit_score` is true.

    Raises:
        CheckpointError: files that are not readable, or values of another type.
        UnsupportedModelError: a setting that is not supported.
    """
    root = modules_root(folder) or folder
    modules = read_modules(root / MODULES)
    if len(modules) != 2 or not modules[0].is_transformer:
        raise UnsupportedModelError(
            f"{root / MODULES}: expected Transformer and LogitScore, got {', '.join(each.type for each in modules)}"
        )
    file = root / modules[1].path / "config.json"
    config = read_json(file)
    true_id, false_id = config.get("true_token_id"), config.get("false_token_id")
    if type(true_id) is not int or not (false_id is None or type(false_id) is int):
        raise CheckpointError(
            f"{file}: expected the numbers of tokens, true_token_id and false_token_id, got {true_id!r} and "
            f"{false_id!r}"
        )
    of_texts = texts_file(folder)
    texts = read_json(of_texts, optional=True)
    processing = dict(texts.get("processing_kwargs") or {})
    variables, limits = dict(processing.pop("chat_template", {})), dict(processing.pop("text", {}))
    max_len = positive(limits.pop("max_length", None) or texts.get("max_seq_length"), "max_seq_length", of_texts)
    variables.pop("restore_suffix", None)  # of prompts that are cut
    unknown = [*(set(texts) - _OF_TEXTS), *processing, *(set(limits) - {"truncation", "padding"})]
    if unknown or texts.get("do_lower_case") or texts.get("transformer_task") not in ("text-generation", None):
        raise UnsupportedModelError(
            f"{of_texts}: expected the settings of a model for text-generation, got "
            f"{unknown[0] if unknown else texts.get('transformer_task')}, which is not honoured here"
        )
    message = (texts.get("modality_config") or {}).get("message") or {}
    settings_file = root / "config_sentence_transformers.json"
    settings = read_json(settings_file, optional=True)
    name = str(settings.get("activation_fn") or "Sigmoid").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{settings_file}: activation_fn is {name}, expected Sigmoid or Identity")
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{settings_file}: default_prompt_name is {default!r}, expected a name of prompts")
    instruction = prompts.get(default) or ""
    in_parts = message.get("format", "structured") != "flat"
    return LogitScoreRule(true_id, false_id, name, instruction, in_parts, variables, max_len)


def score_pairs(
    model: TextModel,
    rule: LogitScoreRule,
    pairs: Sequence[tuple[str, str]],
    *,
    truncate: bool | int | None,
    logits_of: LogitsOf,
) -> np.ndarray:
    """Returns the scores of pairs of a query and a document, float32[num_pairs].

    Args:
        model: A model that generates.
        rule: Of its checkpoint.
        pairs: The texts.
        truncate: None or False: prompts are not cut.
        logits_of: Returns the logits of a token behind prompts, which the engine does not tell.

    Raises:
        InvalidArgumentError: a prompt that is too long, or `truncate` is to cut it.
        ChatTemplateError: the chat template does not render.
    """
    if truncate:
        raise InvalidArgumentError(
            f"truncate: expected none for {model.name}, whose template ends behind the document, got {truncate!r}; "
            "shorten documents"
        )
    prompts = _prompts(model, rule, pairs)
    for index, prompt in enumerate(prompts):
        if rule.max_len is not None and len(prompt) > rule.max_len:
            raise InvalidArgumentError(
                f"texts[{index}]: expected at most {rule.max_len} tokens with the template, got {len(prompt)}; shorten "
                "it"
            )
    if rule.false_id is None:
        found = logits_of(prompts, rule.true_id)
    else:
        logprobs = label_logprobs(model, prompts, (rule.true_id, rule.false_id))
        found = logprobs[:, 0] - logprobs[:, 1]
    return 1 / (1 + np.exp(-found)) if rule.activation == "Sigmoid" else found


def label_logprobs(model: TextModel, prompts: Sequence[Sequence[int]], label_ids: Sequence[int]) -> np.ndarray:
    """Returns log-probabilities of labels as the next token, among these labels alone.

    Args:
        model: A model that generates.
        prompts: Token ids.
        label_ids: Different token ids.

    Returns:
        float32[num_prompts, num_labels].
    """
    from transformers import GenerationConfig

    from torchax_serve.request_params import RequestParams

    each = [
        RequestParams.resolve(
            SamplingParams(max_new_tokens=1, do_sample=False, allowed_token_ids=(label,), logprobs=0, speculate=False),
            GenerationConfig(),
        )
        for label in label_ids
    ]
    answers = []
    for prompt in prompts:
        request = make_request(model, prompt, None)
        # One answer for each label, which is its only token: log-probabilities are those before such options.
        answers.append([dataclasses.replace(request, params=own, answer_index=i) for i, own in enumerate(each)])
    found = [completion.logprobs for completion in complete_all(model, answers)]
    rows = np.asarray([own[0].logprob for own in found if own is not None], np.float32)
    rows = rows.reshape(len(prompts), len(label_ids))
    shifted = rows - rows.max(1, keepdims=True)
    normalized: np.ndarray = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return normalized


def _prompts(model: TextModel, rule: LogitScoreRule, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Returns the token ids of pairs in the chat template, whose roles are query and document."""
    tokenizer: Any = model.text_tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise CheckpointError(f"{model.name}: expected a chat template with the roles query and document, got none")
    system = [_message("system", rule.instruction, rule)] if rule.instruction else []
    conversations = [
        [*system, _message("query", query, rule), _message("document", document, rule)] for query, document in pairs
    ]
    variables = {**tokenizer.special_tokens_map, **rule.variables}
    is_complete = not variables.pop("add_generation_prompt", False)
    job = TemplateJob(tokenizer.get_chat_template(), conversations, variables, is_complete=is_complete)
    found = []
    for text in shared_renderer().render(job).texts:
        if isinstance(text, ChatTemplateError):
            raise ChatTemplateError(f"the chat template of {model.name} {text}") from text
        found.append(encode_rendered(tokenizer, text))
    return found


def _message(role: str, text: str, rule: LogitScoreRule) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if rule.in_parts else text}
