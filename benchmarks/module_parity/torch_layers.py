"""Cases of PyTorch's own layers, each with random weights."""

from __future__ import annotations

import torch
from torch import nn

from module_parity.compare import Case


def _floats(*shape):
    return lambda: (torch.randn(*shape),)


def _attention():
    return Case(lambda: nn.MultiheadAttention(16, 4, batch_first=True), lambda: (torch.randn(2, 5, 16),) * 3)


def _masked_attention():
    def inputs():
        x = torch.randn(2, 5, 16)
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        return (x, x, x), {"key_padding_mask": mask, "need_weights": False}

    return Case(lambda: nn.MultiheadAttention(16, 4, batch_first=True), inputs)


def _named():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    decoder = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True, norm_first=True)

    def pair():
        return (torch.randn(2, 5, 16), torch.randn(2, 3, 16))

    return {
        "MultiheadAttention": _attention(),
        "MultiheadAttention, masked": _masked_attention(),
        "TransformerEncoder": Case(lambda: nn.TransformerEncoder(layer, 2), _floats(2, 5, 16)),
        "TransformerDecoder": Case(lambda: nn.TransformerDecoder(decoder, 2), pair),
        "Transformer": Case(lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True), pair),
        "RNN": Case(lambda: nn.RNN(4, 6, 2, bidirectional=True), _floats(5, 2, 4)),
        "LSTM": Case(lambda: nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True), _floats(2, 5, 4)),
        "LSTM, projected": Case(lambda: nn.LSTM(4, 6, proj_size=3), _floats(5, 2, 4)),
        "GRU": Case(lambda: nn.GRU(4, 6, 2, batch_first=True), _floats(2, 5, 4)),
        "LSTMCell": Case(lambda: nn.LSTMCell(4, 6), _floats(2, 4)),
        "GRUCell": Case(lambda: nn.GRUCell(4, 6), _floats(2, 4)),
        "RNNCell": Case(lambda: nn.RNNCell(4, 6), _floats(2, 4)),
        "Embedding": Case(lambda: nn.Embedding(9, 4, padding_idx=0), lambda: (torch.tensor([[1, 0, 8]]),)),
        "EmbeddingBag": Case(
            lambda: nn.EmbeddingBag(9, 4, mode="mean"), lambda: (torch.tensor([1, 2, 8, 3]), torch.tensor([0, 3]))
        ),
        "Bilinear": Case(lambda: nn.Bilinear(3, 4, 5), lambda: (torch.randn(2, 3), torch.randn(2, 4))),
        "AdaptiveLogSoftmaxWithLoss": Case(
            lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
            lambda: (torch.randn(4, 8), torch.tensor([0, 6, 12, 3])),
        ),
        "CTCLoss": Case(
            nn.CTCLoss,
            lambda: (
                torch.randn(9, 2, 5).log_softmax(-1),
                torch.tensor([[1, 2, 3], [2, 2, 4]]),
                torch.tensor([9, 8]),
                torch.tensor([3, 2]),
            ),
        ),
        "weight_norm": Case(lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3)), _floats(1, 3, 8)),
        "spectral_norm": Case(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), _floats(2, 4)),
        "orthogonal": Case(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 4)), _floats(2, 5)),
    }


def _plain():
    """Layers of one tensor: shape of the input, and layers."""
    rows = {
        (2, 6): (nn.Linear(6, 3), nn.Softmax(-1), nn.GLU(), nn.PReLU(6), nn.BatchNorm1d(6), nn.RMSNorm(6)),
        (2, 4, 9): (
            nn.Conv1d(4, 6, 3, groups=2, dilation=2),
            nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1),
            nn.InstanceNorm1d(4, affine=True),
            nn.AdaptiveAvgPool1d(4),
            nn.AdaptiveMaxPool1d(4),
            nn.LPPool1d(2, 3),
            nn.Conv1d(4, 6, 3, padding="same", padding_mode="circular"),
        ),
        (2, 4, 8, 8): (
            nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
            nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2),
            nn.BatchNorm2d(4),
            nn.GroupNorm(2, 4),
            nn.LayerNorm((8, 8)),
            nn.LocalResponseNorm(3),
            nn.PixelShuffle(2),
            nn.PixelUnshuffle(2),
            nn.ChannelShuffle(2),
            nn.Unfold(3, padding=1),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.AvgPool2d(3, 2, 1, count_include_pad=False),
            nn.AdaptiveAvgPool2d((3, 5)),
            nn.AdaptiveMaxPool2d((3, 5)),
            nn.LPPool2d(2, 2),
            nn.Upsample(scale_factor=1.7, mode="bilinear"),
            nn.Upsample(scale_factor=2, mode="bicubic", align_corners=True),
            nn.Upsample(size=(5, 11), mode="nearest"),
            nn.ReplicationPad2d(2),
            nn.ReflectionPad2d(2),
            nn.CircularPad2d(2),
            nn.Softmax2d(),
        ),
        (1, 3, 4, 6, 6): (
            nn.Conv3d(3, 4, 3, padding=1),
            nn.ConvTranspose3d(3, 4, 3, stride=2),
            nn.BatchNorm3d(3),
            nn.MaxPool3d(2),
            nn.AdaptiveAvgPool3d((2, 3, 4)),
            nn.Upsample(scale_factor=2, mode="trilinear"),
        ),
    }
    found = {}
    for shape, layers in rows.items():
        for layer in layers:
            found[repr(layer)] = Case(lambda layer=layer: layer, _floats(*shape))
    return found


def cases():
    """Every case by name."""
    return _plain() | _named()
