"""Masks that hold reasoning to a budget, with every family's markers as special tokens and as plain text.

What a masked answer has of reasoning is read by the parser of answers, which knows nothing of budgets.
"""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import torchax_serve
from torchax_serve.sampling.thinking_budget import MarkerTokens, ReasoningMarkers, ThinkingBudgetMasks
from torchax_serve.sampling.token_masks import num_words
from torchax_serve.server.response_families import FAMILIES
from torchax_serve.server.response_parsing import AnswerParser, begun_answer

THINKING = {family.name: family for family in FAMILIES if family.reasoning_markers is not None}
BEHIND = {"gpt-oss": "<|start|>assistant<|channel|>final<|message|>"}
THOUGHT = "First 2 < 3, then </b> ends it, and so on to the end."
ANSWER = "The answer is four."


def tokenizer_of(*special):
    found = AutoTokenizer.from_pretrained(Path(torchax_serve.__file__).parent / "embedded")
    found.add_special_tokens({"additional_special_tokens": list(special)})
    return found


def special_of(name, markers):
    if name == "gpt-oss":
        return ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
    return ["<|channel>", "<channel|>"] if name == "gemma4" else [markers.opening, markers.closing]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def answer_of(masks, tokenizer, wanted, behind):
    """The tokens of a model that wants some tokens, and those behind the reasoning once it has been closed for it."""
    found, wanted = [], list(wanted)
    while wanted:
        bitmask = np.full(num_words(len(tokenizer)), -1, np.int32)
        masks.fill(bitmask, found)
        allowed = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: len(tokenizer)]
        if allowed[wanted[0]]:
            found.append(wanted.pop(0))
            continue
        (forced,) = np.flatnonzero(allowed)
        found.append(int(forced))
        wanted = list(behind) if tuple(found[-len(closing_ids(masks)) :]) == closing_ids(masks) else wanted
    return found


def closing_ids(masks):
    return masks._tokens.closing_ids


def parsed(family, prompt, text):
    parser = AnswerParser(family, prompt)
    steps = [*(parser.push(char) for char in text), parser.flush()]
    return "".join(step.reasoning for step in steps), "".join(step.content for step in steps)


@pytest.mark.fast
@pytest.mark.parametrize("is_special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("is_opened", [False, True], ids=["answer", "prompt"])
@pytest.mark.parametrize("name", THINKING)
def test_reasoning_has_no_more_tokens_than_its_budget(name, is_opened, is_special):
    family, markers = THINKING[name], THINKING[name].reasoning_markers
    tokenizer = tokenizer_of(*(special_of(name, markers) if is_special else ()))
    tokens = MarkerTokens(markers, tokenizer)
    opening, thought = markers.opening + markers.gap, encode(tokenizer, THOUGHT)
    behind = encode(tokenizer, BEHIND.get(name, "") + ANSWER)
    prompt = str(family.template.get("start_anchor", "")) + (opening if is_opened else "")
    begun = [] if is_opened else encode(tokenizer, opening)
    natural = [*begun, *thought, *encode(tokenizer, markers.closing), *behind]
    for budget in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, len(thought), 1000):
        masks = ThinkingBudgetMasks(budget, tokens, begun_answer(family, prompt))
        ids = answer_of(masks, tokenizer, natural, behind)
        reasoning, content = parsed(family, prompt, tokens.decode(ids))
        # A token at which the closing text may begin is not left over.
        kept = min(budget, len(thought))
        is_begun = 0 < budget < len(thought) and thought[budget - 1] == tokens.closing_ids[0]
        expected = tokenizer.decode(thought[: kept - 1 if is_begun else kept])
        assert (reasoning.strip(), content.strip()) == (expected.strip(), ANSWER), budget
        assert ids == natural or budget < len(thought)


@pytest.mark.fast
@pytest.mark.parametrize("is_special", [True, False], ids=["special", "plain"])
def test_several_reasonings_have_one_budget(is_special):
    """The tokens of the closing text count as no reasoning; once all are spent, no other reasoning is begun."""
    markers = ReasoningMarkers("<think>", "</think>")
    tokenizer = tokenizer_of(*(("<think>", "</think>") if is_special else ()))
    tokens, first, second = MarkerTokens(markers, tokenizer), "One two.", "Three four five."
    natural = encode(tokenizer, f"<think>{first}</think><think>{second}</think>{ANSWER}")
    left = 3
    masks = ThinkingBudgetMasks(len(encode(tokenizer, first)) + left, tokens)
    text = tokens.decode(answer_of(masks, tokenizer, natural, encode(tokenizer, ANSWER)))
    shown = tokenizer.decode(encode(tokenizer, second)[:left])
    assert text == f"<think>{first}</think><think>{shown}</think>{ANSWER}"
    if is_special:
        bitmask = np.full(num_words(len(tokenizer)), -1, np.int32)
        masks = ThinkingBudgetMasks(0, tokens)
        masks.fill(bitmask, encode(tokenizer, "<think></think>"))
        opening = tokenizer.convert_tokens_to_ids("<think>")
        assert bitmask.view(np.uint32)[opening // 32] == 0xFFFFFFFF & ~(1 << (opening % 32))


@pytest.mark.fast
def test_masks_are_done_once_no_reasoning_can_follow():
    markers, tokenizer = ReasoningMarkers("<think>", "</think>"), tokenizer_of()
    tokens = MarkerTokens(markers, tokenizer)

    def is_done(text, begun=""):
        masks = ThinkingBudgetMasks(5, tokens, begun)
        masks.fill(np.full(num_words(len(tokenizer)), -1, np.int32), encode(tokenizer, text))
        return masks.is_done

    assert is_done("Four.") and is_done("<think>Two</think>\n\nFour") and is_done("so</think>Four", "<think>\nHm, ")
    assert not (is_done("") or is_done("\n<thi") or is_done("<think>Two") or is_done("<think>Two</think>\n"))


@pytest.mark.fast
def test_markers_may_share_tokens_with_other_text():
    """`.</think>` whose tokens are `.<`, `/think` and `>` ends a reasoning as well."""

    class Characters:
        def __init__(self, pieces):
            self.pieces, self.added_tokens_decoder = pieces, {}

        def encode(self, text, **_):
            return [self.pieces.index(char) for char in text]

        def decode(self, ids, **_):
            return "".join(self.pieces[index] for index in ids)

    tokenizer = Characters([*"<>/abcdefghijklmnopqrstuvwxyz.", ".<", "/think", ">\n\nA"])
    masks = ThinkingBudgetMasks(3, MarkerTokens(ReasoningMarkers("<think>", "</think>"), tokenizer), "<think>")
    bitmask = np.full(2, -1, np.int32)
    ids = [tokenizer.pieces.index(piece) for piece in ("a", ".<", "/think", ">\n\nA")]
    masks.fill(bitmask, ids)
    assert masks.is_done and (bitmask == -1).all()
