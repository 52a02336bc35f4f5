"""Images and audio in prompts: input checks, positions, encoders as separate programs."""

from torchax_serve.multimodal.processor import processor_of

__all__ = ["processor_of"]
