"""Images beside text: what is asked of inputs, positions of images, encoders as programs of their own."""

from torchax_serve.multimodal.processor import processor_of

__all__ = ["processor_of"]
