"""Response templates of model families: how their answers spell reasoning and tool calls.

In the format of `transformers.utils.chat_parsing`; a checkpoint's own template comes first (`response_template_for`).
A family is recognised by what its chat template writes.
"""

# ruff: noqa: RUF001  (the markers of DeepSeek have other bars than ASCII)
from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.sampling.thinking_budget import ReasoningMarkers
from torchax_serve.server.call_forms import CallForm
from torchax_serve.server.call_ids import form_demanded
from torchax_serve.server.response_family import (
    CALL,
    EACH,
    INLINE,
    OBJECT,
    ResponseFamily,
    at_start,
    fields,
    reasoning,
)

_LLAMA_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}}
_LLAMA_FORM = CallForm('{"name": ', ', "parameters": ', "}", between=None, quotes_name=True)
_THINK = ReasoningMarkers("<think>", "</think>")
_MISTRAL_THINK = ReasoningMarkers("[THINK]", "[/THINK]")
_CHATML = "<|im_start|>assistant\n"
_XML_ARGUMENT = ("<parameter=", ">\n", "\n</parameter>\n")
XML_CALL: Mapping[str, Any] = {
    # Qwen3-Coder often leaves <tool_call> out, and Llama 3.1 writes JSON behind the name.
    "open_pattern": r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>(?!\s*\{)",
    "close": "</function>",
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        r"(?=\s*(?:<parameter=[^>\n]+>|</function>|\Z))"
    },
    "transform": CALL,
}
_XML_BEGIN = r"<tool_call>\s*<function=[^>\n]+>\s*(?:<parameter=|</function>)"
XML_END = re.compile(r"(?<=</function>)\s*</tool_call>")
NAMED_JSON: Mapping[str, Any] = {
    "open_pattern": r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>\s*(?=\{)",
    "close": "</function>",
    "content": "json",
    "transform": CALL,
}
HERMES_CALL: Mapping[str, Any] = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "transform": OBJECT,
}
_MISTRAL_NAMED: Mapping[str, Any] = {
    "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>[\w-]+))?(?:\[ARGS\])?\s*(?=\{)",
    "content": "json",
    "transform": CALL,
}
_MISTRAL_LIST: Mapping[str, Any] = {
    "open_pattern": r"\[TOOL_CALLS\]\s*(?=[\[{])",
    "content": "json",
    "transform": EACH,
    "transform_each": True,
}
INLINE_CALL: Mapping[str, Any] = {
    "repeats": True,
    "open_pattern": r'(?<=\n)(?=\{\s*(?:"type":\s*"function",\s*)?"name":\s*"[\w.-]{1,64}",\s*'
    r'"(?:parameters|arguments)":\s*\{)',
    "content": "json",
    "transform": OBJECT,
}
MISTRAL_CALLS: Sequence[Mapping[str, Any]] = [_MISTRAL_NAMED, _MISTRAL_LIST]
_SEED_THINK = ReasoningMarkers("<seed:think>", "</seed:think>")
_COHERE_THINK = ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>", is_first=False)
_LFM_CALLS = fields(
    [
        {
            "open_pattern": r"<\|tool_call_start\|>(?=\s*\[?\s*[A-Za-z_])",
            "close": "<|tool_call_end|>",
            "content": "python-call-list",
            "transform": EACH,
            "transform_each": True,
        },
        {
            "open_pattern": r"<\|tool_call_start\|>\s*(?=\{|\[\s*\{)",
            "close": "<|tool_call_end|>",
            "content": "json",
            "transform": OBJECT,
        },
    ],
    reasoning(_THINK),
)
_LFM_AROUND = ("<|tool_call_start|>[", "]<|tool_call_end|>")
_KIMI_OPENINGS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_KIMI_THINK = ReasoningMarkers("<think>", "</think>", ends=_KIMI_OPENINGS)


def python_calls(begin: str) -> Mapping[str, Any]:
    """Returns the field of a list of Python's calls, behind a pattern, at the end of an answer."""
    return {
        "open_pattern": begin + r"(?=\[\s*[A-Za-z_][\w.-]*\(\s*(?:\)|\w+\s*=))",
        "close_pattern": r"(?<=\])(?=\s*(?:<\||\Z))",
        "content": "python-call-list",
        "transform": EACH,
        "transform_each": True,
    }


def _llama(token: str) -> list[Mapping[str, Any]]:
    """Returns the fields of Llama's calls, which are complete answers.

    Args:
        token: Pattern of the token in front of a call, which is often left out at the begin of an answer.
    """
    begin = rf"(?:{at_start(f'(?:{token})?')}|(?<=}})\s*[;,]?\s*|{token}\s*)"
    return [
        {
            "open_pattern": begin + r'(?=\{\s*"(?:name|type|function|parameters)")',
            "content": "json",
            "transform": _LLAMA_CALL,
        },
        NAMED_JSON,
        python_calls(at_start(f"(?:{token})?")),
    ]


def _deepseek(name: str, signs: tuple[str, ...], form: tuple[str, str, str], between: str) -> ResponseFamily:
    """Returns a family with DeepSeek's calls, of R1 and V3 or of V3.1."""
    markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = {
        "open_pattern": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[\w.-]+)\n```json\n"
        r"|(?!function<)(?P<name>[\w.-]+)<｜tool▁sep｜>)",
        "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>",
        "content": "json",
        "transform": CALL,
    }
    return ResponseFamily(
        name,
        signs,
        {"start_anchor": "<｜Assistant｜>", "fields": fields([call], reasoning(_THINK), markers)},
        CallForm(*form, between=between, opening=markers[0], closing=markers[1]),
        markers=_THINK,
    )


FAMILIES: tuple[ResponseFamily, ...] = (
    ResponseFamily(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        {
            "start_anchor": "<|start|>assistant",
            "fields": {
                **fields(
                    [
                        {
                            "open_pattern": r"(?:<\|channel\|>(?:commentary|analysis))? to=functions\.(?P<name>[\w.-]+)"
                            r"(?:<\|channel\|>commentary)?[^<]*(?:<\|constrain\|>)?[^<]*<\|message\|>",
                            "close_pattern": r"<\|call\|>|<\|end\|>(?:<\|start\|>assistant)?",
                            "content": "json",
                            "transform": CALL,
                        }
                    ],
                    {
                        "open": "<|channel|>analysis<|message|>",
                        "close_pattern": r"<\|end\|>(?:<\|start\|>assistant)?",
                    },
                    ("<|start|>assistant", "<|return|>", "<|end|>"),
                ),
                "content_shown": {
                    "open_pattern": r"<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>\w+)?<\|message\|>",
                    "close_pattern": r"<\|return\|>|<\|end\|>(?:<\|start\|>assistant)?",
                    "repeats": True,
                },
            },
        },
        CallForm("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>", between=None),
        is_harmony=True,
        markers=ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|>", is_first=False),
    ),
    ResponseFamily(
        "kimi",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        {
            "start_anchor": "<|im_assistant|>assistant<|im_middle|>",
            "fields": fields(
                [
                    {
                        "open_pattern": r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?"
                        r"(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>",
                        "close": "<|tool_call_end|>",
                        "content": "json",
                        "transform": CALL,
                    }
                ],
                reasoning(_KIMI_THINK),
                (*_KIMI_OPENINGS, *(each.replace("begin", "end") for each in _KIMI_OPENINGS)),
            ),
        },
        CallForm(
            "<|tool_call_begin|>functions.",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            between="",
            opening="<|tool_calls_section_begin|>",
            closing="<|tool_calls_section_end|>",
            has_index=True,
        ),
        id_form="indexed",
        markers=_KIMI_THINK,
    ),
    _deepseek(
        "deepseek",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        "\n",
    ),
    _deepseek(
        "deepseek-v3.1",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "",
    ),
    ResponseFamily(
        "deepseek-dsml",
        ("｜DSML｜",),
        {
            "start_anchor": "<｜Assistant｜>",
            "fields": fields(
                [
                    {
                        "open_pattern": r'<｜DSML｜invoke name="(?P<name>[\w.-]+)">',
                        "close": "</｜DSML｜invoke>",
                        "content": "xml-inline",
                        "content_args": {
                            "tag_pattern": r'<｜DSML｜parameter name="(?P<key>[^"\n]+)"(?: string="\w+")?>'
                            r"(?P<value>.*?)</｜DSML｜parameter>(?=\s*(?:<｜DSML｜parameter |</｜DSML｜invoke>|\Z))"
                        },
                        "transform": CALL,
                    }
                ],
                reasoning(_THINK),
                (re.compile(r"</?｜DSML｜(?:function|tool)_calls>"),),
            ),
        },
        markers=_THINK,
    ),
    ResponseFamily(
        "gemma4",
        ("<|tool_call>call:", "<tool_call|>"),
        {
            "start_anchor": "<|turn>model\n",
            "fields": fields(
                [
                    {
                        "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)",
                        "close": "<tool_call|>",
                        "content": "json",
                        "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
                        "transform": CALL,
                    }
                ],
                {"open_pattern": r"<\|channel>thought\n?", "close": "<channel|>"},
            ),
        },
        CallForm("<|tool_call>call:", "", "<tool_call|>", between="", delimiter='<|"|>'),
        markers=ReasoningMarkers("<|channel>thought", "<channel|>", gap="\n", is_first=False),
    ),
    ResponseFamily(
        "functiongemma",
        ("<start_function_call>",),
        {
            "start_anchor": "<start_of_turn>model\n",
            "fields": fields(
                [
                    {
                        "open_pattern": r"<start_function_call>call:(?P<name>[\w.-]+)(?=\{)",
                        "close": "<end_function_call>",
                        "content": "json",
                        "content_args": {"string_delims": [["<escape>", "<escape>"]], "unquoted_keys": True},
                        "transform": CALL,
                    }
                ]
            ),
        },
    ),
    ResponseFamily(
        "lfm2",
        ("<|tool_list_start|>",),
        {"start_anchor": _CHATML, "fields": _LFM_CALLS},
        markers=_THINK,
        around_calls=_LFM_AROUND,
    ),
    ResponseFamily(
        "lfm2.5",
        ("<|tool_call_start|>",),
        {"start_anchor": _CHATML, "fields": _LFM_CALLS},
        markers=_THINK,
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        around_calls=_LFM_AROUND,
    ),
    ResponseFamily(
        "tool-calls",
        ("<tool_calls>",),
        {
            "start_anchor_pattern": r"(?!)",
            "fields": fields(
                [
                    {
                        "open_pattern": r"<tool_calls>\s*(?=\{|\[\s*\{)",
                        "close": "</tool_calls>",
                        "content": "json",
                        "transform": OBJECT,
                    },
                    HERMES_CALL,
                ],
                reasoning(_THINK),
            ),
        },
        CallForm(
            '{"name": ',
            ', "arguments": ',
            "}",
            between=", ",
            opening="<tool_calls>[",
            closing="]</tool_calls>",
            quotes_name=True,
        ),
        markers=_THINK,
    ),
    ResponseFamily(
        "cohere",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        {
            "start_anchor": "<|CHATBOT_TOKEN|>",
            "fields": {
                **fields(
                    [
                        {
                            "open": "<|START_ACTION|>",
                            "close": "<|END_ACTION|>",
                            "content": "json",
                            "transform": {
                                "type": "function",
                                "function": {"name": "{tool_name}", "arguments": "{parameters}"},
                            },
                            "transform_each": True,
                        }
                    ],
                    {"open": _COHERE_THINK.opening, "close": _COHERE_THINK.closing},
                ),
                "content_shown": {
                    "open_pattern": r"<\|START_(?:RESPONSE|TEXT)\|>",
                    "close_pattern": r"<\|END_(?:RESPONSE|TEXT)\|>",
                    "repeats": True,
                },
            },
        },
        CallForm(
            '{"tool_name": ',
            ', "parameters": ',
            "}",
            between=",\n    ",
            opening="<|START_ACTION|>[\n    ",
            closing="\n]<|END_ACTION|>",
            quotes_name=True,
        ),
        markers=_COHERE_THINK,
    ),
    ResponseFamily(
        "minimax",
        ("<minimax:tool_call>",),
        {
            "start_anchor": "]~b]ai\n",
            "fields": fields(
                [
                    {
                        "open_pattern": r'<invoke name="(?P<name>[\w.-]+)">',
                        "close": "</invoke>",
                        "content": "xml-inline",
                        "content_args": {
                            "tag_pattern": r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>'
                            r'(?=\s*(?:<parameter name="|</invoke>|\Z))'
                        },
                        "transform": CALL,
                    }
                ],
                reasoning(_THINK),
                ("<minimax:tool_call>", re.compile(r"(?<=</invoke>)\s*</minimax:tool_call>")),
            ),
        },
        CallForm(
            '<invoke name="',
            '">\n',
            "</invoke>",
            opening="<minimax:tool_call>\n",
            closing="\n</minimax:tool_call>",
            argument=('<parameter name="', '">', "</parameter>\n"),
        ),
        markers=_THINK,
    ),
    ResponseFamily(
        "seed-oss",
        ("<seed:tool_call>", "<function="),
        {
            "start_anchor": "<seed:bos>assistant\n",
            "fields": fields(
                [
                    {
                        "open_pattern": r"(?:<seed:tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
                        "close": "</function>",
                        "content": "xml-inline",
                        "content_args": {
                            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>"
                            r"(?=\s*(?:<parameter=[^>\n]+>|</function>|\Z))"
                        },
                        "transform": CALL,
                    }
                ],
                reasoning(_SEED_THINK),
                (re.compile(r"(?<=</function>)\s*</seed:tool_call>"),),
            ),
        },
        CallForm(
            "<seed:tool_call>\n<function=",
            ">\n",
            "</function>\n</seed:tool_call>",
            argument=("<parameter=", ">", "</parameter>\n"),
        ),
        markers=_SEED_THINK,
    ),
    ResponseFamily(
        "glm",
        ("<arg_key>", "<arg_value>"),
        {
            "start_anchor": "<|assistant|>",
            "fields": fields(
                [
                    {
                        "open_pattern": r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?=<)",
                        "close": "</tool_call>",
                        "content": "xml-inline",
                        "content_args": {
                            "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                            r"(?=\s*(?:<arg_key>|</tool_call>|\Z))"
                        },
                        "transform": CALL,
                    }
                ],
                reasoning(_THINK),
            ),
        },
        CallForm(
            "<tool_call>", "\n", "</tool_call>", argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
        ),
        markers=_THINK,
    ),
    ResponseFamily(
        "qwen-xml",
        ("<tool_call>", "<function=", "<parameter="),
        {
            "start_anchor": _CHATML,
            # Qwen 3.5 often begins a call without an end of its reasoning.
            "fields": fields([XML_CALL, HERMES_CALL, NAMED_JSON], reasoning(_THINK, _XML_BEGIN), (XML_END,)),
        },
        CallForm("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", argument=_XML_ARGUMENT),
        markers=_THINK,
    ),
    ResponseFamily(
        "hermes",
        ("<tool_call>",),
        {"start_anchor": _CHATML, "fields": fields([HERMES_CALL, XML_CALL, NAMED_JSON], reasoning(_THINK), (XML_END,))},
        CallForm('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", quotes_name=True),
        markers=_THINK,
    ),
    ResponseFamily(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        {"start_anchor": "[/INST]", "fields": fields(MISTRAL_CALLS, reasoning(_MISTRAL_THINK))},
        CallForm("[TOOL_CALLS]", "[ARGS]", "", between=""),
        id_form="nine",
        markers=_MISTRAL_THINK,
    ),
    ResponseFamily(
        "mistral-list",
        ("[TOOL_CALLS]",),
        {"start_anchor": "[/INST]", "fields": fields(MISTRAL_CALLS, reasoning(_MISTRAL_THINK))},
        CallForm(
            '{"name": ', ', "arguments": ', "}", between=", ", opening="[TOOL_CALLS] [", closing="]", quotes_name=True
        ),
        id_form="nine",
        markers=_MISTRAL_THINK,
    ),
    ResponseFamily(
        "llama",
        ("<|start_header_id|>", '"parameters"'),
        {
            "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "fields": {**fields(_llama(r"<\|python_tag\|>")), INLINE: INLINE_CALL},
        },
        _LLAMA_FORM,
    ),
    ResponseFamily(
        "llama4",
        ("<|header_start|>", '"parameters"'),
        {
            "start_anchor": "<|header_start|>assistant<|header_end|>\n\n",
            "fields": {**fields(_llama(r"<\|python_start\|>"), markers=("<|python_end|>",)), INLINE: INLINE_CALL},
        },
        _LLAMA_FORM,
    ),
    ResponseFamily(
        "think",
        ("</think>",),
        {"start_anchor_pattern": r"(?!)", "fields": fields([], reasoning(_THINK))},
        markers=_THINK,
    ),
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
    template = getattr(tokenizer, "chat_template", None)
    source = template if isinstance(template, str) else json.dumps(template or "", ensure_ascii=False)
    if chosen is not None:
        found = chosen_template(chosen)
        return None if found is None else _with_ids(found, source)
    own = getattr(tokenizer, "response_template", None)
    tokens = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    family = next((family for family in FAMILIES if _is_of(family, source, tokens)), None)
    if isinstance(own, Mapping):
        known = ResponseFamily("checkpoint", (), own) if family is None else family
        family = dataclasses.replace(known, name="checkpoint", signs=(), template=own)
    return None if family is None else _with_ids(family, source)


def _is_of(family: ResponseFamily, source: str, tokens: Collection[str]) -> bool:
    """Returns whether a chat template, or its tokenizer's tokens, have all signs of a family."""
    has_tokens = bool(family.tokens) and all(token in tokens for token in family.tokens)
    return has_tokens or all(sign in source for sign in family.signs)


def _with_ids(family: ResponseFamily, source: str) -> ResponseFamily:
    return dataclasses.replace(family, id_form=form_demanded(source, family.id_form))


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
