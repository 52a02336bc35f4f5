"""Structural tags: grammars in which free text and text of schemas alternate.

A tree of formats, as vLLM and xgrammar define it. Free text ends where the text behind it begins, so that it may stand
at the end of a tag or of the answer, and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from torchax_serve.sampling.grammar import JSON_OPTIONS, closed, lark_text

MAX_REPEATS = 1024
"""Most repetitions that a format may ask for."""
MAX_PARTS = 1024
"""Most elements, tags or texts in one list."""
MAX_ENDS, MAX_END_CHARS = 16, 128
"""Most ends of a tag, and characters of one: they stand behind each of the formats that may be the last in the tag."""
MAX_TERM_CHARS = 1 << 20
"""Most characters of the term of a format."""
_TOKEN_LEVEL = ("token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch")
_ANSWER_END: tuple[str, ...] = ()
"""What follows a format that the answer ends with."""

Follow = tuple[str, ...] | None
"""The texts of which one follows a format and is a part of its rule, `_ANSWER_END`, or None for something else."""


def structural_tag_grammar(value: Any) -> str:
    """Returns the grammar of a ``structural_tag`` with format, or structures and triggers.

    Raises:
        ValueError: It has other fields, or a format that cannot be honoured; with its name.
    """
    if not isinstance(value, dict):
        raise ValueError("it is an object")
    fields = set(value) - {"type"}
    if fields == {"format"}:
        return _Formats().grammar(value["format"])
    if fields == {"structures", "triggers"}:
        return _Formats().grammar(_of_structures(value["structures"], value["triggers"]))
    names = ", ".join(sorted(fields))[:100]
    raise ValueError(f"it has the field format, or structures and triggers, and got {names or 'none'}")


def _of_structures(structures: Any, triggers: Any) -> dict[str, Any]:
    """Returns the format of the earlier form."""
    tags = []
    for each in _listed("structures", structures, dict):
        if set(each) != {"begin", "schema", "end"} or not isinstance(each["schema"], dict):
            raise ValueError("a structure has the texts begin and end, and the object schema")
        content = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append({"type": "tag", "begin": each["begin"], "content": content, "end": each["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _TagRules:
    """The rules of a grammar in Lark's syntax, as they are made."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, body: str, *, is_terminal: bool = False, options: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"{'T' if is_terminal else 'r'}_{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def free_text(self, excludes: Any, length: str = "*") -> str:
        """Returns the terminal of text without some texts."""
        texts = _listed("excludes", excludes, str) if excludes else []
        body = f"/(?s:.{length})/"
        if texts:
            body += f" & ~/(?s:.*)({'|'.join(map(_escaped, texts))})(?s:.*)/"
        return self.add(body, is_terminal=True)

    def text_until(self, kind: str, excludes: Any, follow: Follow, length: str = "*") -> str:
        """Returns the term of free text up to what follows, which the shortest match finds."""
        if follow is None:
            raise ValueError(f"{kind} stands at the end of a tag or of the answer, and got something behind it")
        text = self.free_text(excludes, length)
        if follow == _ANSWER_END:
            return self.add(text)
        return self.add(f"{text} {_one_of(map(_literal, follow))}", options="[lazy]")


class _Formats:
    """Makes the rules of a tree of formats, in Lark's syntax."""

    def __init__(self) -> None:
        self._rules = _TagRules()
        self._grammars: list[dict[str, str]] = []  # of formats that have one of their own
        self._makers: Mapping[str, Callable[[Mapping[str, Any], Follow], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "plus": self._repeated,
            "star": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "dispatch": self._dispatch,
        }

    def grammar(self, root: Any) -> str:
        """Returns the grammar of answers in a format."""
        start = self._of(root, _ANSWER_END)
        text = "\n".join(["%llguidance {}", f"start: {start}", *self._rules.lines])
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": text}, *self._grammars]})

    def _of(self, value: Any, follow: Follow) -> str:
        """Returns the term of a format and of what follows it."""
        kind = value.get("type") if isinstance(value, dict) else None
        if kind in _TOKEN_LEVEL:
            raise ValueError(f"formats are texts, and {kind} is one of tokens")
        if not isinstance(kind, str) or kind not in self._makers:
            raise ValueError(f"a format is one of {', '.join(self._makers)}, and got {str(kind)[:40]!r}")
        term = self._makers[kind](value, follow)
        if len(term) > MAX_TERM_CHARS:
            raise ValueError(f"a format has a grammar of at most {MAX_TERM_CHARS} characters, and got {len(term)}")
        return term

    def _const_string(self, value: Mapping[str, Any], follow: Follow) -> str:
        _check_fields(value, {"value"})
        return _then(_literal(_text("const_string.value", value["value"])), follow)

    def _json_schema(self, value: Mapping[str, Any], follow: Follow) -> str:
        _check_fields(value, {"json_schema"}, style="json", any_order=False)
        schema = {} if value["json_schema"] is True else value["json_schema"]
        if not isinstance(schema, dict):
            raise ValueError("json_schema.json_schema is an object, or true")
        return _then(self._rules.add("%json " + json.dumps({**closed(schema), "x-guidance": JSON_OPTIONS})), follow)

    def _regex(self, value: Mapping[str, Any], follow: Follow) -> str:
        """One terminal with what follows it, which else would take the text behind as well."""
        _check_fields(value, {"pattern"})
        if follow is None:
            raise ValueError("a regex stands at the end of a tag or of the answer, or in front of a const_string")
        pattern = re.sub(
            r"(\\.)|/", lambda found: found[1] or r"\/", _text("regex.pattern", value["pattern"]), flags=16
        )
        pattern = pattern.replace("\n", r"\n")
        return self._rules.add(_then(f"/({pattern})/" if pattern else '""', follow), is_terminal=True)

    def _grammar(self, value: Mapping[str, Any], follow: Follow) -> str:
        _check_fields(value, {"grammar"})
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": lark_text(_text("grammar.grammar", value["grammar"]))})
        return _then(self._rules.add(f"@{name}"), follow)

    def _any_text(self, value: Mapping[str, Any], follow: Follow) -> str:
        _check_fields(value, set(), excludes=None, max_chars=None, max_tokens=None)
        if value.get("max_tokens") is not None:
            raise ValueError("any_text has no max_tokens here; write max_chars")
        most = value.get("max_chars")
        if most is not None and (not _is_count(most) or most >= 1 << 16):
            raise ValueError("any_text.max_chars is a whole number from 0 to 65535")
        length = "*" if most is None else f"{{0,{most}}}"
        return self._rules.text_until("any_text", value.get("excludes"), follow, length)

    def _sequence(self, value: Mapping[str, Any], follow: Follow) -> str:
        _check_fields(value, {"elements"})
        elements = _listed("sequence.elements", value["elements"], dict)
        terms, behind = [self._of(elements[-1], follow)], elements[-1]
        for element in reversed(elements[:-1]):
            if element.get("type") == "regex" and behind.get("type") == "const_string":
                terms[0] = self._of(element, (_text("const_string.value", behind["value"]),))  # in the constant's place
                if len(terms) == 1:
                    terms = [_then(terms[0], follow)]
            else:
                terms.insert(0, self._of(element, None))
            behind = element
        return f"({' '.join(terms)})"

    def _or(self, value: Mapping[str, Any], follow: Follow) -> str:
        _check_fields(value, {"elements"})
        return _one_of(self._of(each, follow) for each in _listed("or.elements", value["elements"], dict))

    def _optional(self, value: Mapping[str, Any], follow: Follow) -> str:
        _check_fields(value, {"content"})
        term = self._of(value["content"], follow)
        return f"({term} | {_one_of(map(_literal, follow))})" if follow else f"({term})?"

    def _repeated(self, value: Mapping[str, Any], follow: Follow) -> str:
        """Returns the term of plus, star and repeat."""
        bounds = {"plus": "+", "star": "*"}.get(value["type"])
        _check_fields(value, {"content"} if bounds else {"content", "min", "max"})
        return _then(f"({self._of(value['content'], None)}){bounds or _bounds(value['min'], value['max'])}", follow)

    def _tag(self, value: Mapping[str, Any], follow: Follow) -> str:
        _check_fields(value, {"begin", "content", "end"}, type="tag")
        return f"({_literal(_text('tag.begin', value['begin']))} {self._inside(value, follow)})"

    def _inside(self, tag: Mapping[str, Any], follow: Follow) -> str:
        """Returns the term of a tag without its begin."""
        _check_fields(tag, {"begin", "content", "end"}, type="tag")
        if tag.get("type", "tag") != "tag":
            raise ValueError("tags are formats of the type tag")
        ends = [tag["end"]] if isinstance(tag["end"], str) else _listed("tag.end", tag["end"], str)
        if len(ends) > MAX_ENDS or any(len(end) > MAX_END_CHARS for end in ends):
            raise ValueError(f"tag.end is at most {MAX_ENDS} texts of at most {MAX_END_CHARS} characters")
        if any(other.startswith(end) for end in ends for other in ends if other is not end):
            raise ValueError("no tag.end is the beginning of another one")
        if ends == [""]:
            return self._of(tag["content"], follow)
        return _then(self._of(tag["content"], tuple(ends)), follow)

    def _triggered_tags(self, value: Mapping[str, Any], follow: Follow) -> str:
        flags = {"at_least_one": False, "stop_after_first": False}
        _check_fields(value, {"triggers", "tags"}, excludes=None, **flags)
        triggers = _listed("triggered_tags.triggers", value["triggers"], str)
        by_trigger: dict[str, list[dict[str, Any]]] = {}
        for tag in _listed("triggered_tags.tags", value["tags"], dict):
            begin = _text("tag.begin", tag.get("begin"))
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                raise ValueError(f"each tag begins with one trigger, and {begin[:40]!r} with {len(matching)}")
            by_trigger.setdefault(matching[0], []).append(tag)
        once, first = _flag(value, "stop_after_first"), _flag(value, "at_least_one")
        behind = follow if once else None  # what a tag is followed by; else free text is
        inside = {
            trigger: [(tag["begin"], self._rules.add(self._inside(tag, behind))) for tag in tags]
            for trigger, tags in by_trigger.items()
        }

        def tags_of(trigger: str) -> str:
            return _one_of(f"{_literal(begin[len(trigger) :])} {rule}" for begin, rule in inside[trigger])

        if first:
            every = [f"{_literal(begin)} {rule}" for tags in inside.values() for begin, rule in tags]
            return _one_of(every) if once else f"{_one_of(every)} {self._dispatched(value, inside, tags_of, follow)}"
        return self._dispatched(value, inside, tags_of, follow, loops=not once)

    def _dispatch(self, value: Mapping[str, Any], follow: Follow) -> str:
        _check_fields(value, {"rules"}, loop=True, excludes=None)
        loops = _flag(value, "loop", default=True)
        contents: dict[str, Any] = {}
        for rule in _listed("dispatch.rules", value["rules"], list):
            if len(rule) != 2 or _text("dispatch.rules", rule[0]) in contents:
                raise ValueError("dispatch.rules are pairs of a text and a format, each with a text of its own")
            contents[rule[0]] = rule[1]
        behind = None if loops else follow
        return self._dispatched(value, contents, lambda text: self._of(contents[text], behind), follow, loops=loops)

    def _dispatched(
        self,
        value: Mapping[str, Any],
        triggers: Mapping[str, Any],
        content: Callable[[str], str],
        follow: Follow,
        *,
        loops: bool = True,
    ) -> str:
        """Returns the term of free text in which each trigger begins what `content` returns for it."""
        if any(not trigger for trigger in triggers):
            raise ValueError("triggers have at least one character")
        rest, excludes = self._rules.text_until(value["type"], value.get("excludes"), follow), value.get("excludes")
        text = self._rules.free_text(excludes)
        heads = []
        for trigger in triggers:
            head = self._rules.add(f"{text} {_literal(trigger)}", options="[lazy]")
            heads.append(f"{head} {content(trigger)}")
        return f"({_one_of(heads)}* {rest})" if loops else f"({' | '.join([*heads, rest])})"

    def _tags_with_separator(self, value: Mapping[str, Any], follow: Follow) -> str:
        flags = {"at_least_one": False, "stop_after_first": False}
        _check_fields(value, {"tags", "separator"}, **flags)
        tag = _one_of(self._tag(each, None) for each in _listed("tags_with_separator.tags", value["tags"], dict))
        separator = _literal(_text("tags_with_separator.separator", value["separator"]))
        tags = tag if _flag(value, "stop_after_first") else f"{tag} ({separator} {tag})*"
        return _then(f"({tags})" if _flag(value, "at_least_one") else f"({tags})?", follow)


def _bounds(least: Any, most: Any) -> str:
    is_known = _is_count(least) and (most == -1 or (_is_count(most) and most >= least))
    if not is_known or max(least, most) > MAX_REPEATS:
        raise ValueError(f"repeat.min and max are 0 to {MAX_REPEATS} in that order, or a max of -1")
    return f"{{{least},{'' if most == -1 else most}}}"


def _then(term: str, follow: Follow) -> str:
    return f"({term} {_one_of(map(_literal, follow))})" if follow else term


def _one_of(terms: Any) -> str:
    return f"({' | '.join(terms)})"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Returns a regular expression for a text, between slashes."""
    return "".join(f"\\x{{{ord(each):x}}}" if not each.isalnum() else each for each in text)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is a text")
    return value


def _listed(name: str, value: Any, kind: type[Any]) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PARTS:
        raise ValueError(f"{name} is a list of 1 to {MAX_PARTS}")
    if not all(isinstance(each, kind) and each for each in value):
        raise ValueError(f"{name} has {'texts' if kind is str else 'objects' if kind is dict else 'pairs'} alone")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _flag(value: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    found = value.get(name, default)
    if not isinstance(found, bool):
        raise ValueError(f"{value['type']}.{name} is true or false")
    return found


def _check_fields(value: Mapping[str, Any], needed: set[str], **optional: Any) -> None:
    """Raises ValueError for a missing or unknown field, or a value that is not honoured.

    Args:
        value: A format.
        needed: Fields that it must have.
        **optional: Fields that it may have; of a text or a flag that is no other's to check, with its only value.
    """
    kind = value.get("type", "a format")
    if missing := sorted(needed - set(value)):
        raise ValueError(f"{kind} has the field {missing[0]}")
    if unknown := sorted(set(value) - needed - set(optional) - {"type"}):
        raise ValueError(f"{kind} has no field {unknown[0][:40]!r} here")
    for name in ("style", "any_order"):
        if name in optional and value.get(name, optional[name]) != optional[name]:
            raise ValueError(f"{kind}.{name} is {json.dumps(optional[name])} here, and got {str(value[name])[:40]}")
