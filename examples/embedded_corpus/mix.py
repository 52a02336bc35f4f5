"""Draws the training conversations, and holds the questions that training never sees."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from embedded_corpus import arithmetic, colours, counting, sentiment, small_talk
from embedded_corpus.conversation import Exchange, is_held_out, normal_form
from embedded_corpus.facts import exchanges_of, read_facts, unseen_exchanges_of
from embedded_corpus.wording import loosely_worded

_PROJECT_FACTS, _JAX_FACTS = read_facts("project"), read_facts("jax")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Be brief.",
    "Answer in one sentence.",
    "You are a tiny model.",
    "You are the assistant of torchax-serve.",
    "Answer politely and briefly.",
    "You answer questions.",
    "Be helpful and honest.",
    "You are a chatbot.",
    "Answer shortly.",
    "Please be kind to the user.",
)
_TASK_WEIGHTS = {
    "project": 24,
    "jax": 18,
    "two-digit sums": 16,
    "two-digit differences": 16,
    "sentiment": 16,
    "one-digit sums": 7,
    "one-digit differences": 6,
    "sums in words": 3,
    "beyond": 2,
    "counting": 14,
    "colours": 6,
    "greetings": 10,
    "off-topic": 6,
    "names": 2,
}
_TASKS_WITH_LOOSE_WORDING = {"project", "jax", "colours", "off-topic"}
_STORY = (
    "Once upon a time a tiny model lived in a package. It knew little, but what it knew it said at once. "
    "People asked it for sums and colours, and it was happy. The end."
)
_HELD_OUT_DRAWS: dict[str, Callable[[random.Random], Exchange]] = {
    "two-digit sums": lambda rng: arithmetic.draw_two_digit(rng, "+", held_out=True),
    "two-digit differences": lambda rng: arithmetic.draw_two_digit(rng, "-", held_out=True),
    "sentiment": lambda rng: sentiment.draw(rng, held_out=True),
}
SHARE_SYSTEM, SHARE_PLAIN_TEXT, SHARE_SINGLE_TURN, SHARE_LOOSE_WORDING = 0.1, 0.05, 0.5, 0.5


@dataclass(frozen=True)
class Conversation:
    """Messages in turn (user first, then model), after an optional system prompt; or plain text, with no turns."""

    exchanges: tuple[Exchange, ...]
    system: str | None = None
    plain_text: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """The conversation as ``apply_chat_template`` takes it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        turns = [
            {"role": role, "content": text}
            for exchange in self.exchanges
            for role, text in (("user", exchange.prompt), ("assistant", exchange.answer))
        ]
        return system + turns


def _fixed_exchanges() -> list[Exchange]:
    """Every exchange that is listed rather than drawn."""
    return [
        *exchanges_of("project", _PROJECT_FACTS),
        *exchanges_of("jax", _JAX_FACTS),
        *exchanges_of("greetings", small_talk.SMALL_TALK),
        *small_talk.off_topic_exchanges(),
        *small_talk.name_exchanges(),
        *counting.exchanges(),
        *colours.exchanges(),
        *arithmetic.one_digit("+"),
        *arithmetic.one_digit("-"),
    ]


def hand_written_held_out() -> dict[str, list[Exchange]]:
    """Evaluation questions written by hand, apart from all patterns, by task."""
    return {
        "project": unseen_exchanges_of("project", _PROJECT_FACTS),
        "jax": unseen_exchanges_of("jax", _JAX_FACTS),
        "greetings": unseen_exchanges_of("greetings", small_talk.SMALL_TALK),
        "off-topic": small_talk.unseen_off_topic_exchanges(),
        "sentiment": sentiment.unseen_exchanges(),
        "one-digit sums": arithmetic.one_digit_in_unseen_frames(),
    }


class Corpus:
    """The split corpus: `draw` for training, `held_out` for evaluation; no held-out prompt is ever drawn.

    Raises ``ValueError`` when two listed exchanges give one prompt two answers.
    """

    def __init__(self) -> None:
        listed = _fixed_exchanges()
        _check_one_answer_each(listed)
        hand_written = {normal_form(e.prompt) for group in hand_written_held_out().values() for e in group}
        trainable: dict[str, dict[str, list[Exchange]]] = defaultdict(lambda: defaultdict(list))
        self.listed_held_out: dict[str, list[Exchange]] = defaultdict(list)
        for exchange in listed:
            if is_held_out(exchange.identity):
                self.listed_held_out[exchange.task].append(exchange)
            elif normal_form(exchange.prompt) not in hand_written:
                trainable[exchange.task][exchange.answer].append(exchange)
        self._forbidden = hand_written | {
            normal_form(e.prompt) for group in self.listed_held_out.values() for e in group
        }
        # grouped by answer, so that an answer with few questions is drawn as often as one with many
        self._groups = {task: list(groups.values()) for task, groups in trainable.items()}
        self._draws: dict[str, Callable[[random.Random], Exchange]] = {
            "two-digit sums": lambda rng: arithmetic.draw_two_digit(rng, "+", held_out=False),
            "two-digit differences": lambda rng: arithmetic.draw_two_digit(rng, "-", held_out=False),
            "sums in words": arithmetic.draw_in_words,
            "beyond": arithmetic.draw_out_of_reach,
            "sentiment": lambda rng: sentiment.draw(rng, held_out=False),
        }

    def is_forbidden(self, exchange: Exchange) -> bool:
        """Whether the prompt of `exchange` is one of the listed or hand-written held-out prompts."""
        return normal_form(exchange.prompt) in self._forbidden

    def draw_exchange(self, rng: random.Random) -> Exchange:
        """One exchange of the training side, by the task weights."""
        while True:
            task = rng.choices(list(_TASK_WEIGHTS), list(_TASK_WEIGHTS.values()))[0]
            exchange = self._draws[task](rng) if task in self._draws else rng.choice(rng.choice(self._groups[task]))
            if task in _TASKS_WITH_LOOSE_WORDING and rng.random() < SHARE_LOOSE_WORDING:
                exchange = replace(exchange, prompt=loosely_worded(rng, exchange.prompt))
            elif task == "greetings" and rng.random() < 0.3:
                exchange = Exchange(task, exchange.prompt.lower(), exchange.answer, exchange.identity)
            if not self.is_forbidden(exchange):
                return exchange

    def draw(self, rng: random.Random) -> Conversation:
        """One training conversation, or now and then a plain text."""
        if rng.random() < SHARE_PLAIN_TEXT:
            return Conversation((), plain_text=self._draw_plain_text(rng))
        num_turns = 1 if rng.random() < SHARE_SINGLE_TURN else rng.randrange(2, 6)
        exchanges: list[Exchange] = []
        name: str | None = None  # of the user, until it is asked for
        while len(exchanges) < num_turns:
            follow_up = _follow_up(rng, exchanges[-1]) if exchanges else None
            if follow_up is None and name and rng.random() < 0.6:
                ask = rng.choice(small_talk.ASK_NAME_FRAMES)
                follow_up = Exchange("names", ask, f"Your name is {name}.", ask)
                name = None
            exchange = follow_up or self.draw_exchange(rng)
            if exchange.answer.startswith("Nice to meet you, "):
                name = exchange.answer.removeprefix("Nice to meet you, ").rstrip("!")
                num_turns = max(num_turns, len(exchanges) + 2)
            exchanges.append(exchange)
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < SHARE_SYSTEM else None
        return Conversation(tuple(exchanges), system)

    def _draw_plain_text(self, rng: random.Random) -> str:
        """Text without turns, so that a bare prompt given to ``generate`` goes on in a sensible way."""
        if rng.random() < 0.15:
            return _STORY
        exchange = self.draw_exchange(rng)
        if exchange.task == "sentiment" and exchange.prompt.endswith("Sentiment:"):
            return f"{exchange.prompt} {exchange.answer}"
        return exchange.answer

    def held_out(self, num_per_task: int, seed: int = 1) -> dict[str, list[Exchange]]:
        """At most `num_per_task` held-out exchanges of each task; the same ones for the same arguments."""
        rng = random.Random(f"held out {seed}")
        chosen = {
            task: rng.sample(group, min(num_per_task, len(group))) for task, group in self.listed_held_out.items()
        }
        for task, draw in _HELD_OUT_DRAWS.items():
            drawn: dict[str, Exchange] = {}
            while len(drawn) < num_per_task:
                exchange = draw(rng)
                drawn.setdefault(exchange.prompt, exchange)
            chosen[task] = list(drawn.values())
        return chosen


def _check_one_answer_each(exchanges: list[Exchange]) -> None:
    answers: dict[str, str] = {}
    for exchange in exchanges:
        before = answers.setdefault(exchange.prompt.lower(), exchange.answer)
        if before != exchange.answer:
            raise ValueError(f"{exchange.prompt!r} has two answers: {before!r} and {exchange.answer!r}")


def _follow_up(rng: random.Random, last: Exchange) -> Exchange | None:
    """A question that needs the exchange before it, where that one allows it."""
    if not last.task.endswith(("sums", "differences")) or rng.random() > 0.4:
        return None
    return arithmetic.draw_follow_up(rng, int(last.answer.rsplit("= ", 1)[1]))
