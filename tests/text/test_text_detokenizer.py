"""The pieces of the detokenizer against transformers' own ``decode`` of all tokens at once."""

import contextlib
import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_of_test import CORPUS, KINDS

from torchax_serve.text import Detokenizer, StopStrings, cut_at_stop
from torchax_serve.text.detokenizer import _CleanUp

few = settings(max_examples=150)
tokenizer_of = functools.cache(lambda kind: KINDS[kind]())
every_kind = pytest.mark.parametrize("kind", KINDS)


def pieces_of(tokenizer, token_ids, **kwargs):
    detokenizer = Detokenizer(tokenizer, **kwargs)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def check(tokenizer, token_ids, **kwargs):
    pieces = pieces_of(tokenizer, token_ids, **kwargs)
    # transformers leaves ids beyond the vocabulary out, or fails over them
    known = [token_id for token_id in token_ids if token_id < len(tokenizer)]
    assert "".join(pieces) == tokenizer.decode(known, **{"skip_special_tokens": True, **kwargs})
    return pieces


@every_kind
@few
@given(data=st.data())
def test_any_tokens(kind, data):
    """Any ids at all, also beyond the vocabulary (models pad their embeddings) and special ones."""
    tokenizer = tokenizer_of(kind)
    ids = st.integers(0, len(tokenizer) + 3)
    token_ids = data.draw(st.lists(ids, max_size=60))
    check(tokenizer, token_ids)
    check(tokenizer, token_ids, skip_special_tokens=False)


@every_kind
@few
@given(data=st.data())
def test_tokens_that_come_together(kind, data):
    """The text does not depend on how many tokens are pushed at a time."""
    tokenizer = tokenizer_of(kind)
    ids = st.integers(0, len(tokenizer) + 3)
    steps = data.draw(st.lists(st.lists(ids, max_size=20), max_size=6))
    token_ids = [token_id for step in steps for token_id in step]
    detokenizer = Detokenizer(tokenizer)
    together = "".join([*(detokenizer.push_all(step) for step in steps), detokenizer.flush()])
    assert together == "".join(pieces_of(tokenizer, token_ids))


@every_kind
@few
@given(text=st.text(max_size=60) | st.text(alphabet=" .,'?!ntmsverdo\n", max_size=60))
def test_any_text(kind, text):
    tokenizer = tokenizer_of(kind)
    check(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", ["sentencepiece_bpe", "gemma_like"])
@few
@given(
    st.lists(
        st.sampled_from("é€😀\N{REPLACEMENT CHARACTER}a").map(lambda c: [f"<0x{byte:02X}>" for byte in c.encode()])
        | st.lists(st.integers(0, 255).map("<0x{:02X}>".format), max_size=3)
        | st.sampled_from(["▁the", "▁", "it", "</s>", "<tool>", "\N{REPLACEMENT CHARACTER}"]).map(lambda t: [t]),
        max_size=25,
    ).map(lambda parts: list(itertools.chain.from_iterable(parts)))
)
def test_runs_of_byte_tokens(kind, tokens):
    """Valid and invalid UTF-8 in byte tokens, special tokens between them."""
    tokenizer = tokenizer_of(kind)
    check(tokenizer, tokenizer.convert_tokens_to_ids(tokens))


@few
@given(st.lists(st.sampled_from(["'", ".", "n", "n't", "'s", "s", "t", "ve", "re", "m", ",", "x"]), max_size=30))
def test_clean_up_that_forms_over_several_words(words):
    """Replacements that become possible only by earlier ones, over words that WordPiece would set apart."""
    tokenizer = tokenizer_of("word_piece_cleaned_up")
    raw = " ".join(words)
    for size in (1, 2, 3):
        clean_up = _CleanUp(tokenizer)
        pieces = [clean_up.push(raw[i : i + size]) for i in range(0, len(raw), size)] + [clean_up.flush()]
        assert "".join(pieces) == tokenizer.clean_up_tokenization(raw)


@every_kind
def test_text_is_yielded_early(kind):
    """A stream that hands everything out at the end would be right and useless."""
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer(CORPUS[1], add_special_tokens=False)["input_ids"]
    pieces = check(tokenizer, token_ids)
    whole = "".join(pieces)
    for num_tokens in range(len(token_ids)):
        soon = tokenizer.decode(token_ids[: max(0, num_tokens - 4)], skip_special_tokens=True)
        assert len("".join(pieces[:num_tokens])) >= len(soon) - 2
    assert pieces[-1] == "" or len(pieces[-1]) <= 8 < len(whole)


@every_kind
def test_pieces_end_between_characters(kind):
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer(CORPUS[2], add_special_tokens=False)["input_ids"]
    for piece in check(tokenizer, token_ids):
        assert "\N{REPLACEMENT CHARACTER}" not in piece


@every_kind
def test_work_per_token_is_bounded(kind, monkeypatch):
    """Counts the tokens given to ``decode`` for a long text, for one of endless byte tokens, and for empty tokens."""
    tokenizer = tokenizer_of(kind)
    text = tokenizer(" ".join(CORPUS), add_special_tokens=False)["input_ids"][:400]
    odd = tokenizer("😀", add_special_tokens=False)["input_ids"][-1:] * 400
    nothing = [len(tokenizer) + 1] * 400
    decode = type(tokenizer).decode
    lengths = []

    def counted(self, token_ids, **kwargs):
        lengths.append(len(token_ids))
        return decode(self, token_ids, **kwargs)

    monkeypatch.setattr(type(tokenizer), "decode", counted)
    for token_ids in (text, odd, nothing):
        lengths.clear()
        pieces_of(tokenizer, token_ids)
        assert sum(lengths) <= 400 * 20 + 2 * len(token_ids)


def test_byte_tokens_of_an_invalid_character_are_exact():
    """One invalid byte turns a whole run into replacement characters; nothing of it may have been shown before."""
    tokenizer = tokenizer_of("gemma_like")
    run = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in [*"é".encode(), 0xFF]]
    end = tokenizer.convert_tokens_to_ids("it")
    assert pieces_of(tokenizer, [end, *run, end]) == ["it", "", "", "", "���it", ""]


@pytest.mark.parametrize("num_spaces", [1, 5, 7, 20, 40])
def test_spaces_that_appear_only_before_more_text(num_spaces):
    """A window of spaces alone would strip them all."""
    tokenizer = tokenizer_of("sentencepiece_in_python")
    check(tokenizer, tokenizer.convert_tokens_to_ids([*"the", *["▁"] * num_spaces, *"dog"]))


class OneMarkPerByte:
    """Decodes as the SentencePiece library does: each byte of an unfinished character is a character of its own."""

    is_fast = False
    clean_up_tokenization_spaces = False
    all_special_ids = ()

    def __len__(self):
        return 256

    def convert_ids_to_tokens(self, token_id):
        return f"<{token_id}>"

    def decode(self, token_ids, **kwargs):
        text, data = [], bytes(token_ids)
        while data:
            for length in range(1, 5):
                with contextlib.suppress(UnicodeDecodeError):
                    text.append(data[:length].decode())
                    break
            else:
                text, length = [*text, "\N{REPLACEMENT CHARACTER}"], 1
            data = data[length:]
        return "".join(text)


@few
@given(st.text(alphabet="a€é😀", max_size=20).map(str.encode) | st.binary(max_size=40))
def test_several_replacement_marks_for_one_unfinished_character(data):
    check(OneMarkPerByte(), list(data))


class Backwards:
    """A tokenizer whose text is rewritten from the start by every token: the worst a decoder can do."""

    is_fast = False
    clean_up_tokenization_spaces = False
    all_special_ids = ()

    def convert_ids_to_tokens(self, token_id):
        return chr(97 + token_id % 26)

    def decode(self, token_ids, **kwargs):
        return "".join(chr(97 + i % 26) for i in reversed(token_ids))


def test_a_tokenizer_that_rewrites_its_text_never_raises():
    pieces = pieces_of(Backwards(), [0, 0, 0, 1, 2])
    assert pieces[:3] == ["a", "a", "a"]
    assert pieces[3:] == ["", "", ""]


@few
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_do_not_depend_on_the_pieces(text, stops, cuts):
    # The definition: the first character with which some stop string is complete ends the text, before the longest.
    expected = text
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            expected = text[: end - max(map(len, complete))]
            break
    assert cut_at_stop(text, stops)[0] == expected
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    watch = StopStrings(stops)
    shown = ""
    for begin, end in itertools.pairwise(edges):
        shown += watch.push(text[begin:end])
        assert expected.startswith(shown)  # never a part of a stop string
    if watch.found is None:
        shown += watch.flush()
    assert shown == expected


@pytest.mark.parametrize("num_first", range(7))
def test_pieces_that_may_not_end_a_text_complete_no_stop_string(num_first):
    """As vLLM's `min_tokens`: a stop string counts if it is complete behind the first tokens."""
    text, stop = "abxaab", "ab"
    watch, shown = StopStrings([stop]), ""
    for index, char in enumerate(text):
        shown += watch.push(char, may_end=index >= num_first)
    shown += watch.flush()
    end = next((i for i in range(num_first, len(text)) if text[: i + 1].endswith(stop)), None)
    assert (shown, watch.found) == ((text, None) if end is None else (text[: end + 1 - len(stop)], stop))
