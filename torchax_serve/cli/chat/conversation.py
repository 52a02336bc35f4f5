"""State of an interactive chat.

It consists of the messages, the system prompt, and the history that fits into the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.multimodal.processor import processor_of
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text.chat import chat, chat_prompt_ids
from torchax_serve.text.messages import has_media
from torchax_serve.text.prompt import position_limit
from torchax_serve.text.text_stream import TextStream, stream

# Fraction of the model's positions that the history leaves for the answer by default.
_ROOM_FOR_ANSWER = 0.25


@dataclass
class Conversation:
    """Chat with a history, or with `raw` independent prompts.

    Attributes:
        model: Model that answers.
        params: Sampling parameters.
        system: System prompt; None if there is none.
        raw: Whether each prompt is continued as plain text, without chat template and history.
        messages: History without the system prompt, oldest first.
        images: Files sent with the next message.
    """

    model: Any
    params: SamplingParams
    system: str | None = None
    raw: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[Path] = field(default_factory=list)

    def answer(self, text: str) -> TextStream:
        """Returns the answer to `text`; only `record` adds it to the history.

        Raises:
            TorchaxServeError: as of `torchax_serve.text.chat.chat` and `torchax_serve.text.text_stream.stream`.
        """
        if self.raw:
            return stream(self.model, text, self.params)
        return chat(self.model, [*self.messages, self._user(text)], self.params, stream=True, system=self.system)

    def attach(self, image: Path) -> None:
        """Attaches `image` to the next message.

        Raises:
            InvalidArgumentError: without a chat there is no place for one, or there is no such file.
            UnsupportedModelError, CheckpointError: as `torchax_serve.multimodal.processor.processor_of`.
        """
        if self.raw:
            raise InvalidArgumentError("an image needs a chat, and this is plain continuation (--raw)")
        if not image.is_file():
            raise InvalidArgumentError(f"image: expected a file with a picture, and there is none at {image}")
        processor_of(self.model)
        self.images.append(image)

    def make_room(self, text: str) -> int:
        """Drops the oldest messages until the history, `text` and an answer fit; returns how many."""
        limit = position_limit(self.model)
        if self.raw or limit is None or self.images or has_media(self.messages):  # an image's length is its model's
            return 0
        wanted = self.params.max_new_tokens or int(limit * _ROOM_FOR_ANSWER)
        room = limit - min(wanted, limit // 2)
        num_before = len(self.messages)
        while self.messages:
            conversation = [*self.messages, self._user(text)]
            if len(chat_prompt_ids(self.model, conversation, system=self.system)) <= room:
                break
            # A question goes with its answer: templates want the roles to alternate.
            del self.messages[:2]
        return num_before - len(self.messages)

    def record(self, text: str, answer: str) -> None:
        """Adds a question and its answer to the history."""
        self.messages += [self._user(text), {"role": "assistant", "content": answer}]
        self.images = []

    def reset(self) -> None:
        """Discards the messages and the images for the next; the system prompt stays."""
        self.messages.clear()
        self.images.clear()

    def set_system(self, text: str | None) -> None:
        """Sets the system prompt, or with None takes it away; checked against the model's template.

        Raises:
            InvalidArgumentError: without a chat there is no place for one.
            ChatTemplateError: the template does not take one.
        """
        if text is not None:
            if self.raw:
                raise InvalidArgumentError("a system prompt needs a chat, and this is plain continuation (--raw)")
            chat_prompt_ids(self.model, [{"role": "user", "content": "Hello"}], system=text)
        self.system = text

    def transcript(self) -> list[dict[str, Any]]:
        """Returns all messages, the system prompt first, in the form that `chat` takes."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def _user(self, text: str) -> dict[str, Any]:
        if not self.images:
            return {"role": "user", "content": text}
        images = [{"type": "image", "image": str(image)} for image in self.images]
        return {"role": "user", "content": [*images, {"type": "text", "text": text}]}
