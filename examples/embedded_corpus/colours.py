"""The colours of common things, and what colours make when they are mixed."""

from __future__ import annotations

import itertools

from embedded_corpus.conversation import Exchange

_THINGS = {
    "green": "grass|a leaf|a frog|a cucumber|a pea|spinach|a lime|broccoli|a cactus|a crocodile|moss|lettuce|"
    "an avocado",
    "red": "blood|a strawberry|a tomato|a cherry|a fire engine|a ruby|a ladybird|a stop sign|ketchup|a heart|"
    "a raspberry",
    "yellow": "a banana|a lemon|the sun|a canary|a sunflower|butter|cheese|a chick|corn|mustard",
    "blue": "the sky|the sea|a sapphire|a blueberry|the ocean|a blue whale|a cornflower",
    "white": "snow|milk|salt|a swan|a polar bear|rice|flour|a cloud|sugar|a snowman|a ghost",
    "black": "coal|night|a raven|tar|a crow|a panther|ink|a tyre|liquorice|a bat",
    "orange": "an orange|a carrot|a pumpkin|a basketball|an apricot|a tangerine|a traffic cone",
    "brown": "chocolate|earth|wood|coffee|a bear|a chestnut|cocoa|soil|a walnut|bread|a potato",
    "pink": "a flamingo|a pig|bubble gum|a piglet|cotton candy|salmon",
    "purple": "a plum|an aubergine|lavender|a violet|an eggplant|an amethyst",
    "grey": "an elephant|a mouse|ash|concrete|lead|a rhino|a donkey|stone|fog",
}
_MIXES = {
    ("red", "yellow"): "orange",
    ("red", "blue"): "purple",
    ("blue", "yellow"): "green",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
    ("red", "green"): "brown",
    ("blue", "white"): "light blue",
    ("black", "red"): "dark red",
}
_THING_FRAMES = (
    "What colour is {x}?",
    "what colour is {x}",
    "What color is {x}?",
    "what color is {x}",
    "Which colour is {x}?",
    "Which colour does {x} have?",
    "What is the colour of {x}?",
    "What is the color of {x}?",
    "Tell me the colour of {x}.",
    "Name the colour of {x}.",
    "The colour of {x}?",
    "What colour does {x} have?",
    "What colour would you paint {x}?",
    "Do you know the colour of {x}?",
    "Is {x} green or red or something else?",
    "Can you tell me what colour {x} is?",
)
_MIX_FRAMES = (
    "What do you get if you mix {a} and {b}?",
    "What do I get when I mix {a} and {b}?",
    "Mix {a} and {b}.",
    "{a} and {b} make which colour?",
    "{a} and {b} make what?",
    "What colour do {a} and {b} make?",
    "What color do {a} and {b} make?",
    "Which colour comes from {a} and {b}?",
    "If I mix {a} with {b}, what colour is it?",
    "What happens when you mix {a} and {b}?",
    "What is {a} mixed with {b}?",
    "{a} plus {b} is which colour?",
    "Mixing {a} and {b} gives what colour?",
    "What do {a} and {b} make?",
    "{a} and {b}?",
    "{a} and {b}",
    "{a} + {b}?",
)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def exchanges() -> list[Exchange]:
    """All colour questions; held out are combinations of a thing (or a mix) and a phrasing."""
    found = []
    for colour, things in _THINGS.items():
        for thing, frame in itertools.product(things.split("|"), _THING_FRAMES):
            found.append(_exchange(frame.format(x=thing), f"{_sentence(thing)} is {colour}."))
    for (first, second), result in _MIXES.items():
        answer = f"{_sentence(first)} and {second} make {result}."
        for (a, b), frame in itertools.product(((first, second), (second, first)), _MIX_FRAMES):
            found.append(_exchange(_sentence(frame.format(a=a, b=b)), answer))
    return found


def _exchange(prompt: str, answer: str) -> Exchange:
    return Exchange("colours", prompt, answer, prompt)
