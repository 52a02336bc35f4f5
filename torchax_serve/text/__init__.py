"""Text in, text out: prompts and chats to token ids, token ids to text as they come."""

from torchax_serve.outputs import Completion, GenerationStats
from torchax_serve.text.chat import chat, chat_prompt_ids, has_chat_template
from torchax_serve.text.detokenizer import Detokenizer, StopStrings, cut_at_stop
from torchax_serve.text.generate_batch import generate_batch
from torchax_serve.text.prompt import TextModel
from torchax_serve.text.text_stream import TextStream, stream

__all__ = [
    "Completion",
    "Detokenizer",
    "GenerationStats",
    "StopStrings",
    "TextModel",
    "TextStream",
    "chat",
    "chat_prompt_ids",
    "cut_at_stop",
    "generate_batch",
    "has_chat_template",
    "stream",
]
