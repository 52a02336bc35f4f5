"""Short sentences that are positive or negative, and the ways to ask which."""

from __future__ import annotations

import random

from embedded_corpus.conversation import Exchange, is_held_out
from embedded_corpus.facts import read_data

_WORDS = {
    name: [" ".join(entry.split()) for entry in entries.split("|")] for name, entries in read_data("sentiment").items()
}
_THINGS = _WORDS["things"]

FRAMES = (
    'Is this positive or negative? "{s}"',
    "Is this positive or negative? {s}",
    "Is this positive or negative: {s}",
    'Is this sentence positive or negative? "{s}"',
    "Is this sentence positive or negative: {s}",
    'Is "{s}" positive or negative?',
    "Is the following positive or negative? {s}",
    "Is the following review positive or negative?\n{s}",
    "{s} Is this positive or negative?",
    "{s}\nPositive or negative?",
    "Positive or negative? {s}",
    'Positive or negative: "{s}"',
    "Sentiment: {s}",
    'Sentiment of "{s}"?',
    "What is the sentiment? {s}",
    'What is the sentiment of "{s}"?',
    "What is the sentiment of this sentence: {s}",
    "What is the sentiment of this review? {s}",
    "Classify the sentiment: {s}",
    "Classify the sentiment of this sentence: {s}",
    "Classify as positive or negative: {s}",
    "Classify this review as positive or negative: {s}",
    "Review: {s}\nSentiment:",
    "Sentence: {s}\nSentiment:",
    "Text: {s}\nIs it positive or negative?",
    "Does this sound positive or negative? {s}",
    "Would you say this is positive or negative? {s}",
    "Tell me if this is positive or negative: {s}",
    "Judge this sentence: {s}",
    "Good or bad? {s}",
)
_INTENSIFIERS = ("", "", "", "very ", "really ", "so ", "quite ", "truly ", "absolutely ", "simply ", "just ", "too ")
_BE = ("was", "is", "was", "is", "seemed", "looked", "turned out", "has been")
_OPENERS = ("The", "The", "The", "This", "My", "Our", "That")


def _adjective(rng: random.Random, good: bool) -> str:
    return rng.choice(_WORDS["good_adjectives"] if good else _WORDS["bad_adjectives"])


def _article(adjective: str) -> str:
    if adjective.startswith("the "):
        return adjective
    return ("an " if adjective[0] in "aeiou" else "a ") + adjective


def _plain(rng: random.Random, good: bool) -> str:
    strength = rng.choice(_INTENSIFIERS)
    if strength == "too " and good:
        strength = ""
    adjective = _adjective(rng, good)
    strength = "" if adjective.startswith("the ") else strength
    return f"{rng.choice(_OPENERS)} {rng.choice(_THINGS)} {rng.choice(_BE)} {strength}{adjective}."


def _double(rng: random.Random, good: bool) -> str:
    thing, other = rng.sample(_THINGS, 2)
    first, second = _adjective(rng, good), _adjective(rng, good)
    return rng.choice(
        (
            f"The {thing} was {first} and the {other} was {second}.",
            f"The {thing} is {first} and {second}.",
            f"{first[0].upper() + first[1:]} and {second}.",
            f"A {thing} that is {first} and {second}.",
        )
    )


def _verb(rng: random.Random, good: bool) -> str:
    verb = rng.choice(_WORDS["good_verbs"] if good else _WORDS["bad_verbs"])
    who = "I" if verb.startswith(("was", "am", "got")) else rng.choice(("I", "I", "We", "My friends", "My wife"))
    if who != "I" and verb.split()[0] in ("love", "like", "enjoy", "recommend", "hate", "dislike", "regret"):
        who = "We"
    return f"{who} {verb} {rng.choice(('the', 'this', 'the', 'my', 'their'))} {rng.choice(_THINGS)}."


def _exclaimed(rng: random.Random, good: bool) -> str:
    adjective, thing = _adjective(rng, good), rng.choice(_THINGS)
    return rng.choice(
        (
            f"What {_article(adjective)} {thing}!",
            f"Such {_article(adjective)} {thing}.",
            f"{_article(adjective).capitalize()} {thing}.",
            f"I had {_article(adjective)} {thing}.",
            f"It was {_article(adjective)} {thing}.",
            f"This is {_article(adjective)} {thing}.",
            f"That was {_article(adjective)} {thing}.",
            f"How {adjective}!",
            f"It is {adjective}.",
            f"{adjective.capitalize()} {thing}!",
            f"I think the {thing} is {adjective}.",
            f"I find this {thing} {adjective}.",
        )
    )


def _negated(rng: random.Random, good: bool) -> str:
    """ "not bad" speaks well of a thing and "not good" ill of it; the plain words are the ones people negate."""
    thing = rng.choice(_THINGS)
    if good:
        adjective = rng.choice(("bad", "boring", "disappointing", "slow", "terrible", "cold", "dull", "awful"))
        return rng.choice(
            (f"The {thing} was not {adjective} at all.", f"The {thing} is not {adjective}.", "Not bad at all!")
        )
    adjective = rng.choice(_WORDS["good_adjectives"][:30])
    return rng.choice(
        (
            f"The {thing} was not {adjective}.",
            f"The {thing} is not {adjective} at all.",
            f"This {thing} was not very {adjective}.",
            f"The {thing} wasn't {adjective}.",
            f"I do not think that the {thing} is {adjective}.",
        )
    )


def _turned(rng: random.Random, good: bool) -> str:
    """Two clauses that disagree: the last one decides."""
    thing = rng.choice(_THINGS)
    return f"The {thing} was {_adjective(rng, not good)} at first, but in the end it was {_adjective(rng, good)}."


def _with_reason(rng: random.Random, good: bool) -> str:
    return _verb(rng, good).rstrip(".") + f" because it was {_adjective(rng, good)}."


def _felt(rng: random.Random, good: bool) -> str:
    feeling = rng.choice(_WORDS["good_feelings" if good else "bad_feelings"])
    verb = rng.choice(("bought", "chose", "saw", "visited", "found", "ordered", "tried", "paid for"))
    who = rng.choice(("I am", "I was", "We are", "I feel"))
    return f"{who} {feeling} that {rng.choice(('I', 'we'))} {verb} the {rng.choice(_THINGS)}."


def _happened(rng: random.Random, good: bool) -> str:
    event = rng.choice(_WORDS["good_events" if good else "bad_events"])
    return f"{rng.choice(_OPENERS)} {rng.choice(_THINGS)} {event}."


def _described_and_happened(rng: random.Random, good: bool) -> str:
    happened = _happened(rng, good)
    return f"{_plain(rng, good).rstrip('.')} and {happened[0].lower()}{happened[1:]}"


def _whole(rng: random.Random, good: bool) -> str:
    return rng.choice(_WORDS["good_sentences"] if good else _WORDS["bad_sentences"])


def _two(rng: random.Random, good: bool) -> str:
    return f"{_plain(rng, good)} {_whole(rng, good)}"


_MAKERS = (
    _plain,
    _plain,
    _plain,
    _double,
    _verb,
    _verb,
    _exclaimed,
    _exclaimed,
    _negated,
    _with_reason,
    _whole,
    _two,
    _felt,
    _happened,
    _described_and_happened,
    _turned,
)


def draw(rng: random.Random, held_out: bool) -> Exchange:
    """A sentence from the asked side of the split in a random frame; the split is by sentence."""
    while True:
        good = rng.random() < 0.5
        sentence = rng.choice(_MAKERS)(rng, good)
        if is_held_out(f"sentence {sentence}") == held_out:
            return in_frame(rng.choice(FRAMES), sentence, good)


def in_frame(frame: str, sentence: str, good: bool) -> Exchange:
    """The question whether `sentence` is positive, and its answer."""
    return Exchange("sentiment", frame.format(s=sentence), "positive" if good else "negative", f"sentence {sentence}")


def unseen_exchanges() -> list[Exchange]:
    """The hand-written evaluation sentences, each in one of the frames."""
    labelled = [(s, True) for s in _WORDS["unseen_good"]] + [(s, False) for s in _WORDS["unseen_bad"]]
    return [in_frame(FRAMES[i % len(FRAMES)], sentence, good) for i, (sentence, good) in enumerate(labelled)]
