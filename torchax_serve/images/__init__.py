"""Images beside text: what is asked of inputs, positions of images, conversations with images."""
