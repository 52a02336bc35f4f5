"""Answers that a model marks in a text, beside eager PyTorch."""

import asyncio
import itertools

import pytest
import torch
from encoder_models import TEXTS, folder, tokenizer

from torchax_serve import InvalidArgumentError, UnsupportedModelError, serve

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


def best(eager, question, context, max_answer_len, top_k):
    """Scores and characters of the best answers in a text that needs one window."""
    encoded = tokenizer()(question, context, return_offsets_mapping=True, return_tensors="pt")
    offsets = encoded.pop("offset_mapping")[0].tolist()
    places = [index for index, part in enumerate(encoded.sequence_ids(0)) if part == 1]
    with torch.no_grad():
        output = eager(**encoded)
    begin, end = (logits[0][places].softmax(-1).tolist() for logits in (output.start_logits, output.end_logits))
    spans = [
        (begin[first] * end[last], offsets[places[first]][0], offsets[places[last]][1])
        for first, last in itertools.combinations_with_replacement(range(len(places)), 2)
        if last - first < max_answer_len
    ]
    return sorted(spans, reverse=True)[:top_k]


def test_answers(tmp_path):
    eager = folder(tmp_path, "BertForQuestionAnswering")
    with serve(tmp_path) as served:
        for context, longest in ((TEXTS[2], 3), (TEXTS[0], 15)):
            found = served.answer("the cat", context, top_k=3, max_answer_len=longest)
            expected = best(eager, "the cat", context, longest, 3)
            assert [(each.start, each.end) for each in found] == [span[1:] for span in expected]
            assert [each.score for each in found] == pytest.approx([span[0] for span in expected], abs=1e-4)
            assert [each.text for each in found] == [context[each.start : each.end] for each in found]
        assert asyncio.run(served.aanswer("the cat", TEXTS[2], max_answer_len=3)) == served.answer(
            "the cat", TEXTS[2], max_answer_len=3
        )
        long = " ".join(TEXTS * 20)
        (one,) = served.answer("a dog", long)
        assert long[one.start : one.end] == one.text
        for question, context, options, message in [
            ("", "a cat", {}, "expected some text, got an empty one"),
            ("cat " * 70, "a cat", {}, "question: expected at most 56 tokens, got 72"),
            ("a", "a cat", {"top_k": 0}, "top_k: expected a whole number >= 1"),
            (5, "a cat", {}, "question: expected a text, got 5"),
        ]:
            with pytest.raises(InvalidArgumentError, match=message):
                served.answer(question, context, **options)
        with pytest.raises(UnsupportedModelError, match="classify: expected"):
            served.classify("a cat")
