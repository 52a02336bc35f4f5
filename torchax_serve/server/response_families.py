"""Response templates of model families: how their answers spell reasoning and tool calls.

In the format of `transformers.utils.chat_parsing`; a checkpoint's own template comes first (`response_template_for`).
A family is recognised by what its chat template writes.
"""

# ruff: noqa: RUF001  (the markers of DeepSeek have other bars than ASCII)
from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.call_forms import CallForm

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_LLAMA_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}}
_LLAMA_FORM = CallForm('{"name": ', ', "parameters": ', "}", between=None, quotes_name=True)
_THINK = {"open": "<think>", "close": "</think>"}
_CHATML = "<|im_start|>assistant\n"


MARKER = "marker"
"""Beginning of the names of fields that are texts of the format, and no part of a message."""
REASONING = ("reasoning", "reasoning_content", "thinking")
"""Names of the field of reasoning."""


def _fields(
    tool_calls: Mapping[str, Any] | None, reasoning: Mapping[str, Any] | None = _THINK, markers: Sequence[str] = ()
) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": {}}
    for index, marker in enumerate(markers):
        fields[f"{MARKER}_{index}"] = {"open": marker, "close_pattern": r"(?=[\s\S])", "repeats": True}
    if reasoning is not None:
        fields["reasoning"] = dict(reasoning)
    if tool_calls is not None:
        fields["tool_calls"] = {"repeats": True, **tool_calls}
    return fields


@dataclasses.dataclass(frozen=True)
class ResponseFamily:
    """Answers of a family of models.

    Attributes:
        name: Name of the family.
        signs: Texts that its chat template has, all of them.
        template: Response template of transformers.
        call: How calls are spelled, for answers held to them; None if they cannot be.
        is_harmony: Whether openai-harmony parses the answers, where it is installed.
    """

    name: str
    signs: tuple[str, ...]
    template: Mapping[str, Any]
    call: CallForm | None = None
    is_harmony: bool = False


_DEEPSEEK = {
    "start_anchor": "<｜Assistant｜>",
    "fields": _fields(
        {
            "open_pattern": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[\w.-]+)\n```json\n"
            r"|(?!function<)(?P<name>[\w.-]+)<｜tool▁sep｜>)",
            "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>",
            "content": "json",
            "transform": _CALL,
        },
        markers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
}
"""DeepSeek's calls, of R1 and V3 and of V3.1."""

FAMILIES: tuple[ResponseFamily, ...] = (
    ResponseFamily(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        {
            "start_anchor": "<|start|>assistant",
            "fields": {
                "content": {"open": "<|channel|>final<|message|>", "close_pattern": r"<\|return\|>|<\|end\|>"},
                "reasoning": {
                    "open": "<|channel|>analysis<|message|>",
                    "close_pattern": r"<\|end\|>(?:<\|start\|>assistant)?",
                },
                "tool_calls": {
                    "open_pattern": r"(?:<\|channel\|>(?:commentary|analysis))? to=functions\.(?P<name>[\w.-]+)"
                    r"(?:<\|channel\|>commentary)?[^<]*(?:<\|constrain\|>)?[^<]*<\|message\|>",
                    "close_pattern": r"<\|call\|>|<\|end\|>(?:<\|start\|>assistant)?",
                    "content": "json",
                    "repeats": True,
                    "transform": _CALL,
                },
            },
        },
        CallForm("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>", between=None),
        is_harmony=True,
    ),
    ResponseFamily(
        "kimi",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        {
            "start_anchor": "<|im_assistant|>assistant<|im_middle|>",
            "fields": _fields(
                {
                    "open_pattern": r"<\|tool_call_begin\|>\s*(?:functions\.)?"
                    r"(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>",
                    "close": "<|tool_call_end|>",
                    "content": "json",
                    "transform": _CALL,
                },
                markers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            ),
        },
        CallForm(
            "<|tool_call_begin|>functions.",
            ":0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            between=None,
            opening="<|tool_calls_section_begin|>",
            closing="<|tool_calls_section_end|>",
        ),
    ),
    ResponseFamily(
        "deepseek",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
        _DEEPSEEK,
        CallForm(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            opening="<｜tool▁calls▁begin｜>",
            closing="<｜tool▁calls▁end｜>",
        ),
    ),
    ResponseFamily(
        "deepseek-v3.1",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        _DEEPSEEK,
        CallForm(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            between="",
            opening="<｜tool▁calls▁begin｜>",
            closing="<｜tool▁calls▁end｜>",
        ),
    ),
    ResponseFamily(
        "gemma4",
        ("<|tool_call>call:", "<tool_call|>"),
        {
            "start_anchor": "<|turn>model\n",
            "fields": _fields(
                {
                    "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)",
                    "close": "<tool_call|>",
                    "content": "json",
                    "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
                    "transform": _CALL,
                },
                {"open_pattern": r"<\|channel>thought\n?", "close": "<channel|>"},
            ),
        },
        CallForm("<|tool_call>call:", "", "<tool_call|>", between="", delimiter='<|"|>'),
    ),
    ResponseFamily(
        "glm",
        ("<arg_key>", "<arg_value>"),
        {
            "start_anchor": "<|assistant|>",
            "fields": _fields(
                {
                    "open_pattern": r"<tool_call>(?P<name>[\w.-]+)\s*(?=<)",
                    "close": "</tool_call>",
                    "content": "xml-inline",
                    "content_args": {
                        "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                    },
                    "transform": _CALL,
                }
            ),
        },
        CallForm(
            "<tool_call>",
            "\n",
            "</tool_call>",
            argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    ResponseFamily(
        "qwen-xml",
        ("<tool_call>", "<function=", "<parameter="),
        {
            "start_anchor": _CHATML,
            "fields": _fields(
                {
                    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                    "close_pattern": r"</function>\s*</tool_call>",
                    "content": "xml-inline",
                    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
                    "transform": _CALL,
                }
            ),
        },
        CallForm(
            "<tool_call>\n<function=",
            ">\n",
            "</function>\n</tool_call>",
            argument=("<parameter=", ">\n", "\n</parameter>\n"),
        ),
    ),
    ResponseFamily(
        "hermes",
        ("<tool_call>",),
        {
            "start_anchor": _CHATML,
            "fields": _fields(
                {
                    "open": "<tool_call>",
                    "close": "</tool_call>",
                    "content": "json",
                    "transform": {"type": "function", "function": "{content}"},
                }
            ),
        },
        CallForm('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", quotes_name=True),
    ),
    ResponseFamily(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        {
            "start_anchor": "[/INST]",
            "fields": _fields(
                {
                    "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?(?=\{)",
                    "close_pattern": r"(?=\[TOOL_CALLS\])",
                    "content": "json",
                    "transform": _CALL,
                },
                {"open": "[THINK]", "close": "[/THINK]"},
            ),
        },
        CallForm("[TOOL_CALLS]", "[ARGS]", "", between=""),
    ),
    ResponseFamily(
        "mistral-list",
        ("[TOOL_CALLS]",),
        {
            "start_anchor": "[/INST]",
            "fields": _fields(
                {
                    "open": "[TOOL_CALLS]",
                    "content": "json",
                    "repeats": False,
                    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
                    "transform_each": True,
                },
                {"open": "[THINK]", "close": "[/THINK]"},
            ),
        },
        CallForm(
            '{"name": ', ', "arguments": ', "}", between=", ", opening="[TOOL_CALLS] [", closing="]", quotes_name=True
        ),
    ),
    ResponseFamily(
        "llama",
        ("<|start_header_id|>", '"parameters"'),
        {
            "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "fields": _fields(
                {
                    # A call is the complete answer: nothing stands in front of it.
                    "open_pattern": r'(?<![\s\S])\s*(?:<\|python_tag\|>)?(?=\{\s*"name")',
                    "content": "json",
                    "repeats": False,
                    "transform": _LLAMA_CALL,
                },
                None,
            ),
        },
        _LLAMA_FORM,
    ),
    ResponseFamily(
        "llama4",
        ("<|header_start|>", '"parameters"'),
        {
            "start_anchor": "<|header_start|>assistant<|header_end|>\n\n",
            "fields": _fields(
                {
                    "open_pattern": r'(?<![\s\S])\s*(?:<\|python_start\|>)?(?=\{\s*"name")',
                    "close": "<|python_end|>",
                    "content": "json",
                    "repeats": False,
                    "transform": _LLAMA_CALL,
                },
                None,
            ),
        },
        _LLAMA_FORM,
    ),
    ResponseFamily("think", ("</think>",), {"start_anchor_pattern": r"(?!)", "fields": _fields(None)}),
)
"""The families, more special ones first."""


def response_template_for(tokenizer: Any, chosen: str | None = None) -> ResponseFamily | None:
    """Returns how a model's answers are spelled.

    That is as chosen, by the checkpoint's own template, or as its family.

    Args:
        tokenizer: Tokenizer of the model.
        chosen: Name of a family, path of a JSON file with a response template, or ``none``; None decides.

    Raises:
        InvalidArgumentError: No family and no file has that name, or the file has no valid template.
    """
    if chosen is not None:
        return chosen_template(chosen)
    own = getattr(tokenizer, "response_template", None)
    template = getattr(tokenizer, "chat_template", None)
    source = template if isinstance(template, str) else json.dumps(template or "", ensure_ascii=False)
    family = next((family for family in FAMILIES if all(sign in source for sign in family.signs)), None)
    if isinstance(own, Mapping):
        call, is_harmony = (None, False) if family is None else (family.call, family.is_harmony)
        return ResponseFamily("checkpoint", (), own, call, is_harmony)
    return family


def chosen_template(chosen: str) -> ResponseFamily | None:
    """Returns the template of an option, as `response_template_for`; None for ``none``.

    Raises:
        InvalidArgumentError: No family and no file has that name, or the file has no valid template.
    """
    if chosen == "none":
        return None
    found = next((family for family in FAMILIES if family.name == chosen), None)
    return found or _from_file(chosen)


def _from_file(path: str) -> ResponseFamily:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        spec = json.loads(Path(path).read_text())
        load_response_template(spec)
    except (OSError, ValueError) as error:
        names = ", ".join(family.name for family in FAMILIES)
        raise InvalidArgumentError(
            f"response_template: expected {names}, none or a file with a response template, got {path} ({error})"
        ) from error
    return ResponseFamily("file", (), spec)
