"""Small talk, introductions by name, and the honest answer to what the model never learned."""

import itertools

from embedded_corpus.conversation import Exchange, all_wordings
from embedded_corpus.facts import read_data, read_facts

SMALL_TALK = read_facts("small_talk")
_OFF_TOPIC = read_data("small_talk")["off_topic"]
_NAMES = read_data("small_talk")["names"]
_NAME_FRAMES = (
    "My name is {}.",
    "I am {}.",
    "I'm {}.",
    "Hello, I am {}.",
    "Hi, my name is {}.",
    "Call me {}.",
    "my name is {}",
    "Hi, I'm {}!",
    "Hello, my name is {}!",
)
ASK_NAME_FRAMES = (
    "What is my name?",
    "What's my name?",
    "Do you remember my name?",
    "Who am I?",
    "Do you know my name?",
    "what is my name",
)


def off_topic_exchanges() -> list[Exchange]:
    """Questions outside of everything the model knows; all get the honest answer."""
    return [Exchange("off-topic", prompt, _OFF_TOPIC["answer"], prompt) for prompt in all_wordings(_OFF_TOPIC["ask"])]


def unseen_off_topic_exchanges() -> list[Exchange]:
    """The hand-written evaluation questions off all topics."""
    return [Exchange("off-topic", prompt, _OFF_TOPIC["answer"], prompt) for prompt in _OFF_TOPIC["unseen"]]


def name_exchanges() -> list[Exchange]:
    """Introductions by name; the name must be copied into the answer."""
    return [
        Exchange("names", frame.format(name), f"Nice to meet you, {name}!", frame.format(name))
        for name, frame in itertools.product(_NAMES, _NAME_FRAMES)
    ]
