"""Aria's experts as transformers had them until 5.17: grouped products beside slices by counts."""

import torch

from model_adapters.quirks import aria


def test_groups_are_those_of_slices():
    generator = torch.Generator().manual_seed(0)
    experts, tokens = torch.nn.Module(), torch.randn(6, 8, generator=generator)
    experts.weight = torch.nn.Parameter(torch.randn(3, 8, 4, generator=generator))
    counts = torch.tensor([2, 0, 4])
    wanted = torch.cat([tokens[:2] @ experts.weight[0], tokens[2:] @ experts.weight[2]])
    found = aria.QUIRK.methods["AriaGroupedExpertsGemm.forward"](experts, tokens, counts)
    torch.testing.assert_close(found, wanted)
