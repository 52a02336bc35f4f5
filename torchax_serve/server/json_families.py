"""Families whose calls are JSON or calls of Python functions, and those without calls."""

# ruff: noqa: RUF001  (the markers of DeepSeek have other bars than ASCII)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.sampling.thinking_budget import ReasoningMarkers
from torchax_serve.server.call_fields import (
    HERMES_CALL,
    INLINE_CALL,
    MISTRAL_CALLS,
    NAMED_JSON,
    XML_CALL,
    XML_END,
    python_calls,
)
from torchax_serve.server.call_forms import CallForm
from torchax_serve.server.response_family import (
    CALL,
    CHATML,
    EACH,
    INLINE,
    KEYED,
    OBJECT,
    THINK,
    ResponseFamily,
    at_start,
    content_between,
    fields,
    reasoning,
)

_LLAMA_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}}
_LLAMA_FORM = CallForm('{"name": ', ', "parameters": ', "}", between=None, quotes_name=True)
_MISTRAL_THINK = ReasoningMarkers("[THINK]", "[/THINK]")
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
    reasoning(THINK),
)
_LFM_AROUND = ("<|tool_call_start|>[", "]<|tool_call_end|>")
_LFM_FORM = CallForm("", "(", ")", between=", ", opening=_LFM_AROUND[0], closing=_LFM_AROUND[1], named=", ")
_THOUGHT = ReasoningMarkers("<|thought_start|>", "<|thought_end|>")
_APERTUS_THINK = ReasoningMarkers("<|inner_prefix|>", "<|inner_suffix|>", ends=("<|tools_prefix|>",))
_SOLAR_THINK = ReasoningMarkers("<|think|>", "<|end|>", is_first=False)
_KIMI_OPENINGS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_KIMI_THINK = ReasoningMarkers("<think>", "</think>", ends=_KIMI_OPENINGS)


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
        {"start_anchor": "<｜Assistant｜>", "fields": fields([call], reasoning(THINK), markers)},
        CallForm(*form, between=between, opening=markers[0], closing=markers[1]),
        markers=THINK,
    )


JSON_FAMILIES: Sequence[ResponseFamily] = (
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
                **content_between(
                    r"<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>\w+)?<\|message\|>",
                    r"<\|return\|>|<\|end\|>(?:<\|start\|>assistant)?",
                ),
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
            index=":",
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
        "minicpm3",
        ("<|thought_start|>",),
        {
            "start_anchor": CHATML,
            "fields": fields(
                [
                    {
                        "open_pattern": r"<\|tool_call_start\|>\s*(?:```(?:python)?\s*)?(?=[A-Za-z_][\w.-]*\()",
                        "close_pattern": r"(?:\s*```)?\s*<\|tool_call_end\|>",
                        "content": "python-call-list",
                        "transform": EACH,
                        "transform_each": True,
                    }
                ],
                reasoning(_THOUGHT),
            ),
        },
        CallForm(
            "",
            "(",
            ")",
            between="\n",
            opening="<|tool_call_start|>\n```python\n",
            closing="\n```\n<|tool_call_end|>",
            named=",",
        ),
        markers=_THOUGHT,
    ),
    ResponseFamily(
        "apertus",
        ("<|tools_prefix|>",),
        {
            "start_anchor": "<|assistant_start|>",
            "fields": fields(
                [
                    {
                        "open_pattern": r"<\|tools_prefix\|>\s*(?=[\[{])",
                        "close": "<|tools_suffix|>",
                        "content": "json",
                        "transform": KEYED,
                    }
                ],
                reasoning(_APERTUS_THINK),
            ),
        },
        CallForm(
            "{",
            ": ",
            "}",
            between=", ",
            opening="<|tools_prefix|>[",
            closing="]<|tools_suffix|>",
            quotes_name=True,
        ),
        markers=_APERTUS_THINK,
    ),
    ResponseFamily(
        "solar-open",
        ("<|tool_call:begin|>", "<|tool_call:args|>"),
        {
            "start_anchor": "<|begin|>assistant",
            "fields": {
                **fields(
                    [
                        {
                            "open_pattern": r"<\|tool_call:begin\|>(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>[\w.-]+)"
                            r"<\|tool_call:args\|>",
                            "close": "<|tool_call:end|>",
                            "content": "json",
                            "transform": CALL,
                        }
                    ],
                    {"open": _SOLAR_THINK.opening, "close": _SOLAR_THINK.closing},
                    ("<|begin|>assistant", "<|tool_calls|>", "<|calls|>", "<|flush|>", "<|end|>"),
                ),
                **content_between(r"<\|content\|>", r"<\|(?:end|flush)\|>"),
            },
        },
        CallForm(
            "<|tool_call:begin|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
            between="",
            opening="<|tool_calls|>",
            closing="<|calls|>",
            id=("[a-z0-9]{10}", "<|tool_call:name|>"),
        ),
        markers=_SOLAR_THINK,
    ),
    ResponseFamily(
        "functionary",
        (">>>all", "<|start_header_id|>"),
        {
            "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "fields": fields(
                [
                    {
                        "open_pattern": r">>>(?!all\n)(?P<name>[\w.-]+)\n(?=\{)",
                        "content": "json",
                        "transform": CALL,
                    }
                ],
                markers=(">>>all\n",),
            ),
        },
        CallForm("", "\n", "", between=">>>", text="all\n"),
    ),
    ResponseFamily(
        "lfm2",
        ("<|tool_list_start|>",),
        {"start_anchor": CHATML, "fields": _LFM_CALLS},
        _LFM_FORM,
        markers=THINK,
        around_calls=_LFM_AROUND,
    ),
    ResponseFamily(
        "lfm2.5",
        ("<|tool_call_start|>",),
        {"start_anchor": CHATML, "fields": _LFM_CALLS},
        _LFM_FORM,
        markers=THINK,
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
                reasoning(THINK),
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
        markers=THINK,
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
                **content_between(r"<\|START_(?:RESPONSE|TEXT)\|>", r"<\|END_(?:RESPONSE|TEXT)\|>"),
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
        "hermes",
        ("<tool_call>",),
        {"start_anchor": CHATML, "fields": fields([HERMES_CALL, XML_CALL, NAMED_JSON], reasoning(THINK), (XML_END,))},
        CallForm('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", quotes_name=True),
        markers=THINK,
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
        {"start_anchor_pattern": r"(?!)", "fields": fields([], reasoning(THINK))},
        markers=THINK,
    ),
)
"""Families with such calls, more special ones first."""
