"""Families whose calls have tags around each argument, or keys without quotes."""

# ruff: noqa: RUF001  (the markers of DeepSeek have other bars than ASCII)
from __future__ import annotations

import re
from collections.abc import Sequence

from torchax_serve.sampling.thinking_budget import ReasoningMarkers
from torchax_serve.server.call_fields import HERMES_CALL, NAMED_JSON, XML_CALL, XML_END, dialect_call, tagged_call
from torchax_serve.server.call_forms import CallForm
from torchax_serve.server.response_family import (
    CHATML,
    THINK,
    ResponseFamily,
    at_start,
    content_between,
    fields,
    reasoning,
)

_XML_BEGIN = r"<tool_call>\s*<function=[^>\n]+>\s*(?:<parameter=|</function>)"
_SEED_THINK = ReasoningMarkers("<seed:think>", "</seed:think>")
_MINIMAX = "]<]minimax[>["
_MINIMAX_THINK = ReasoningMarkers("<mm:think>", "</mm:think>")
_SOLAR_THINK = ReasoningMarkers("<|think:start|>", "<|think:end|>")
_KIMI_THINK = ReasoningMarkers("<|open|>think<|sep|>", "<|close|>think<|sep|>", is_first=False)
_KIMI_CALL = r'<\|open\|>call tool="(?P<name>[\w.-]+)"(?: index="\d+")?<\|sep\|>'


def _dsml(name: str, signs: tuple[str, ...], around: str) -> ResponseFamily:
    """Returns a family with DeepSeek's calls, of V3.2 or of V4."""
    call = tagged_call(
        r'<｜DSML｜invoke name="(?P<name>[\w.-]+)">',
        "</｜DSML｜invoke>",
        ('<｜DSML｜parameter name="', r'"(?: string="(?P<kind>\w+)")?>', "</｜DSML｜parameter>"),
        key=r'[^"\n]+',
    )
    return ResponseFamily(
        name,
        signs,
        {
            "start_anchor": "<｜Assistant｜>",
            "fields": fields([call], reasoning(THINK), (re.compile(r"</?｜DSML｜(?:function|tool)_calls>"),)),
        },
        CallForm(
            '<｜DSML｜invoke name="',
            '">\n',
            "</｜DSML｜invoke>",
            opening=f"<｜DSML｜{around}>\n",
            closing=f"\n</｜DSML｜{around}>",
            argument=('<｜DSML｜parameter name="', '" string="{is_text}">', "</｜DSML｜parameter>\n"),
        ),
        markers=THINK,
    )


def _hunyuan(name: str, signs: tuple[str, ...], suffix: str) -> ResponseFamily:
    """Returns a family with the calls of Hunyuan 3, whose texts have a suffix."""
    markers = ReasoningMarkers(f"<think{suffix}>", f"</think{suffix}>")
    begin, close = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
    call = tagged_call(
        rf"{begin}\s*(?P<name>[\w.-]+)\s*<tool_sep{suffix}>\s*",
        close,
        (f"<arg_key{suffix}>", rf"</arg_key{suffix}>\s*<arg_value{suffix}>", f"</arg_value{suffix}>"),
        key=".*?",
    )
    return ResponseFamily(
        name,
        signs,
        {
            "start_anchor_pattern": r"<｜hy_Assistant(?::\w+)?｜>",
            "fields": fields([call], reasoning(markers), (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>")),
        },
        CallForm(
            begin,
            f"<tool_sep{suffix}>\n",
            f"{close}\n",
            between="",
            opening=f"<tool_calls{suffix}>\n",
            closing=f"</tool_calls{suffix}>",
            argument=(
                f"<arg_key{suffix}>",
                f"</arg_key{suffix}>\n<arg_value{suffix}>",
                f"</arg_value{suffix}>\n",
            ),
        ),
        markers=markers,
    )


TAGGED_FAMILIES: Sequence[ResponseFamily] = (
    _dsml("deepseek-dsml", ("｜DSML｜", "function_calls>"), "function_calls"),
    _dsml("deepseek-v4", ("｜DSML｜",), "tool_calls"),
    ResponseFamily(
        "gemma4",
        ("<|tool_call>call:", "<tool_call|>"),
        {
            "start_anchor": "<|turn>model\n",
            "fields": fields(
                [dialect_call(r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)", "<tool_call|>", '<|"|>')],
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
                [dialect_call(r"<start_function_call>call:(?P<name>[\w.-]+)(?=\{)", "<end_function_call>", "<escape>")]
            ),
        },
        CallForm("<start_function_call>call:", "", "<end_function_call>", between="", delimiter="<escape>"),
    ),
    ResponseFamily(
        "kimi-k3",
        ("<|open|>", "<|sep|>", "<|close|>"),
        {
            "start_anchor_pattern": r'<\|open\|>message role="assistant"[^<]*<\|sep\|>',
            "fields": {
                **fields(
                    [
                        tagged_call(
                            rf"{_KIMI_CALL}(?!<\|open\|>json)",
                            "<|close|>call<|sep|>",
                            (
                                '<|open|>argument key="',
                                r'"(?: type="(?P<kind>\w+)")?<\|sep\|>',
                                r"<\|close\|>argument<\|sep\|>",
                            ),
                            key=r'[^"\n]+',
                        ),
                        {
                            **NAMED_JSON,
                            "open_pattern": rf'{_KIMI_CALL}<\|open\|>json(?: type="object")?<\|sep\|>\s*(?=\{{)',
                            "close": "<|close|>json<|sep|><|close|>call<|sep|>",
                        },
                    ],
                    {"open": _KIMI_THINK.opening, "close": _KIMI_THINK.closing},
                    (re.compile(r"<\|(?:open|close)\|>tools<\|sep\|>"), "<|close|>message<|sep|>", "<|end_of_msg|>"),
                ),
                **content_between(r"<\|open\|>response<\|sep\|>", r"<\|close\|>response<\|sep\|>"),
            },
        },
        CallForm(
            '<|open|>call tool="',
            '"<|sep|>',
            "<|close|>call<|sep|>",
            between="",
            opening="<|open|>tools<|sep|>",
            closing="<|close|>tools<|sep|>",
            argument=('<|open|>argument key="', '" type="{kind}"<|sep|>', "<|close|>argument<|sep|>"),
            quote="&quot;",
            index='" index="',
        ),
        markers=_KIMI_THINK,
    ),
    ResponseFamily(
        "minimax-m3",
        (_MINIMAX, "<mm:think>"),
        {
            "start_anchor": "]~b]ai\n",
            "fields": fields(
                [
                    tagged_call(
                        rf'{re.escape(_MINIMAX)}\s*<invoke name="(?P<name>[\w.-]+)">',
                        f"{_MINIMAX}</invoke>",
                        (f"{_MINIMAX}<", ">", rf"{re.escape(_MINIMAX)}</(?P=key)>"),
                    )
                ],
                reasoning(_MINIMAX_THINK),
                (
                    f"{_MINIMAX}<tool_call>",
                    f"{_MINIMAX}</tool_call>",
                    re.compile(at_start("</mm:think>")),  # in front of an answer without reasoning
                ),
            ),
        },
        CallForm(
            f'{_MINIMAX}<invoke name="',
            '">',
            f"{_MINIMAX}</invoke>\n",
            between="",
            opening=f"{_MINIMAX}<tool_call>\n",
            closing=f"{_MINIMAX}</tool_call>",
            argument=(f"{_MINIMAX}<", ">", f"{_MINIMAX}</{{key}}>"),
            nested=_MINIMAX,
        ),
        markers=_MINIMAX_THINK,
    ),
    ResponseFamily(
        "minimax",
        ("<minimax:tool_call>",),
        {
            "start_anchor": "]~b]ai\n",
            "fields": fields(
                [
                    tagged_call(
                        r'<invoke name="(?P<name>[\w.-]+)">',
                        "</invoke>",
                        ('<parameter name="', '">', "</parameter>"),
                        key=r'[^"\n]+',
                    )
                ],
                reasoning(THINK),
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
        markers=THINK,
    ),
    ResponseFamily(
        "minicpm5",
        ('<function name="', '<param name="'),
        {
            "start_anchor": CHATML,
            "fields": fields(
                [
                    tagged_call(
                        r'<function name="(?P<name>[^"\n]+)">',
                        "</function>",
                        ('<param name="', r'">(?P<quote><!\[CDATA\[)?', r"(?(quote)\]\]>)</param>"),
                        key=r'[^"\n]+',
                    )
                ],
                reasoning(THINK),
            ),
        },
        CallForm('<function name="', '">', "</function>", argument=('<param name="', '">', "</param>")),
        markers=THINK,
    ),
    ResponseFamily(
        "seed-oss",
        ("<seed:tool_call>", "<function="),
        {
            "start_anchor": "<seed:bos>assistant\n",
            "fields": fields(
                [
                    tagged_call(
                        r"(?:<seed:tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
                        "</function>",
                        ("<parameter=", ">", "</parameter>"),
                    )
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
        "solar-open2",
        ("<|tool_call:start|>", "<|tool_arg:start|>"),
        {
            "start_anchor": "<|im:start|>assistant<|im:content|>",
            "fields": fields(
                [
                    tagged_call(
                        r"<\|tool_call:start\|>\s*(?P<name>[\w.-]+)[ \t]*\n",
                        "<|tool_call:end|>",
                        ("<|tool_arg:start|>", r"<\|tool_arg:value\|>", r"<\|tool_arg:end\|>"),
                        key=".*?",
                    )
                ],
                reasoning(_SOLAR_THINK),
            ),
        },
        CallForm(
            "<|tool_call:start|>",
            "\n",
            "<|tool_call:end|>",
            argument=("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>\n"),
        ),
        markers=_SOLAR_THINK,
    ),
    _hunyuan("hunyuan3", ("<tool_sep", "<arg_key", ":opensource"), ":opensource"),
    _hunyuan("hunyuan3-preview", ("<tool_sep", "<arg_key"), ""),
    ResponseFamily(
        "glm",
        ("<arg_key>", "<arg_value>"),
        {
            "start_anchor": "<|assistant|>",
            "fields": fields(
                [
                    tagged_call(
                        r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?=<)",
                        "</tool_call>",
                        ("<arg_key>", r"</arg_key>\s*<arg_value>", "</arg_value>"),
                        key=".*?",
                    )
                ],
                reasoning(THINK),
            ),
        },
        CallForm(
            "<tool_call>", "\n", "</tool_call>", argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
        ),
        markers=THINK,
    ),
    ResponseFamily(
        "qwen-xml",
        ("<tool_call>", "<function=", "<parameter="),
        {
            "start_anchor": CHATML,
            # Qwen 3.5 often begins a call without an end of its reasoning.
            "fields": fields([XML_CALL, HERMES_CALL, NAMED_JSON], reasoning(THINK, _XML_BEGIN), (XML_END,)),
        },
        CallForm(
            "<tool_call>\n<function=",
            ">\n",
            "</function>\n</tool_call>",
            argument=("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        markers=THINK,
    ),
)
"""Families with such calls, more special ones first."""
