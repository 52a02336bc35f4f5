"""Random weights of tiny models."""

import torch


def draw_matrices(module, std):
    """Draws what has more than one axis anew, so that outputs differ clearly from token to token and prompt to prompt.

    What a model begins with is so small that its greedy choices hang on rounding. Seed torch before.
    """
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
