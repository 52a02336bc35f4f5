"""Linear layers on a grid of scales and zero points, for tools that pack integers."""

import torch

GROUP = 32


def layer_of(weight, bits, group_of):
    """A linear layer on the grid of its scales and zero points [out, groups], which the packers need."""
    groups = int(group_of.max()) + 1
    scale, zero = torch.empty(weight.shape[0], groups), torch.empty(weight.shape[0], groups)
    for group in range(groups):
        least, most = (find(weight[:, group_of == group], 1) for find in (torch.amin, torch.amax))
        scale[:, group] = ((most - least) / (2**bits - 1)).half().float()
        zero[:, group] = torch.round(-least / scale[:, group]).clamp(1, 2**bits - 1)
    numbers = torch.round(weight / scale[:, group_of] + zero[:, group_of]).clamp(0, 2**bits - 1)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = (numbers - zero[:, group_of]) * scale[:, group_of]
    return layer, scale, zero


def parts_of(module, packed, names):
    return {f"{module}.{name}": getattr(packed, name) for name in names}
