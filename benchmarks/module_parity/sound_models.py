"""Cases of torchaudio: its models, small, and transforms of sound."""

from __future__ import annotations

import functools

import torch
from torchaudio import models, transforms

from module_parity.compare import Case


def _wav2vec2(make):
    layers = {
        "extractor_mode": "group_norm",
        "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2)],
        "extractor_conv_bias": False,
        "encoder_embed_dim": 32,
        "encoder_projection_dropout": 0.0,
        "encoder_pos_conv_kernel": 16,
        "encoder_pos_conv_groups": 4,
        "encoder_num_layers": 2,
        "encoder_num_heads": 4,
        "encoder_attention_dropout": 0.0,
        "encoder_ff_interm_features": 64,
        "encoder_ff_interm_dropout": 0.0,
        "encoder_dropout": 0.0,
        "encoder_layer_norm_first": False,
        "encoder_layer_drop": 0.0,
        "aux_num_out": 12,
    }
    if make is models.wavlm_model:
        layers |= {"encoder_num_buckets": 16, "encoder_max_distance": 64}
    return make(**layers)


def _wave():
    return (torch.randn(1, 1600),)


def _lengths(*shape):
    return torch.randn(2, *shape), torch.tensor([shape[0], shape[0] - 3])


def _models():
    return {
        "Conformer": Case(lambda: models.Conformer(16, 2, 32, 2, 5), lambda: _lengths(12, 16)),
        "ConvTasNet": Case(lambda: models.ConvTasNet(2, 16, 16, 3, 8, 16, 2, 1), lambda: (torch.randn(1, 1, 320),)),
        "DeepSpeech": Case(lambda: models.DeepSpeech(8, 32, 5), lambda: (torch.randn(1, 1, 10, 8),)),
        "Emformer": Case(lambda: models.Emformer(16, 2, 32, 2, 4, right_context_length=1), lambda: _lengths(13, 16)),
        "HDemucs": Case(
            lambda: models.HDemucs(["a", "b"], channels=8, depth=3, nfft=256), lambda: (torch.randn(1, 2, 4096),)
        ),
        "Tacotron2": Case(
            lambda: models.Tacotron2(
                n_mels=8,
                n_symbol=20,
                symbol_embedding_dim=16,
                encoder_embedding_dim=16,
                attention_rnn_dim=16,
                attention_hidden_dim=16,
                decoder_rnn_dim=16,
                prenet_dim=8,
                postnet_embedding_dim=16,
                decoder_dropout=0.0,
                attention_dropout=0.0,
            ),
            lambda: (torch.randint(1, 20, (1, 6)), torch.tensor([6]), torch.randn(1, 8, 5), torch.tensor([5])),
        ),
        "Wav2Letter": Case(lambda: models.Wav2Letter(5, "waveform"), lambda: (torch.randn(1, 1, 4000),)),
        "Wav2Vec2Model": Case(functools.partial(_wav2vec2, models.wav2vec2_model), _wave),
        "WavLM": Case(functools.partial(_wav2vec2, models.wavlm_model), _wave),
        "WaveRNN": Case(
            lambda: models.WaveRNN([5, 5, 8], 16, 200, 1, 16, 16, n_freq=8, n_hidden=16, n_output=8),
            lambda: (torch.randn(1, 1, 200 * 3), torch.randn(1, 1, 8, 7)),
        ),
        "SquimObjective": Case(
            lambda: models.squim_objective_model(16, 64, 16, 2, 16, 1, "LSTM", 8),
            lambda: (torch.randn(1, 800),),
        ),
    }


def _transforms():
    plain = {
        "Spectrogram": lambda: transforms.Spectrogram(64),
        "MelSpectrogram": lambda: transforms.MelSpectrogram(16000, 256, n_mels=16),
        "MFCC": lambda: transforms.MFCC(16000, 8, melkwargs={"n_fft": 256, "n_mels": 16}),
        "LFCC": lambda: transforms.LFCC(16000, 32, 8, speckwargs={"n_fft": 256}),
        "Resample": lambda: transforms.Resample(16000, 8000),
        "AmplitudeToDB": lambda: transforms.AmplitudeToDB(),
        "MuLawEncoding": lambda: transforms.MuLawEncoding(),
        "ComputeDeltas": lambda: transforms.ComputeDeltas(),
        "Preemphasis": lambda: transforms.Preemphasis(),
        "Deemphasis": lambda: transforms.Deemphasis(),
        "Fade": lambda: transforms.Fade(50, 50),
        "Vol": lambda: transforms.Vol(0.5),
        "SpectralCentroid": lambda: transforms.SpectralCentroid(16000, 256),
        "SlidingWindowCmn": lambda: transforms.SlidingWindowCmn(50),
    }
    found = {f"transforms.{name}": Case(make, _wave) for name, make in plain.items()}
    found["transforms.InverseSpectrogram"] = Case(
        lambda: transforms.InverseSpectrogram(64), lambda: (torch.randn(1, 33, 12, dtype=torch.complex64),)
    )
    found["transforms.MelScale"] = Case(
        lambda: transforms.MelScale(8, 16000, n_stft=33), lambda: (torch.rand(1, 33, 9),)
    )
    found["transforms.FFTConvolve"] = Case(lambda: transforms.FFTConvolve(), lambda: (*_wave(), torch.randn(1, 20)))
    return found


def cases():
    """Every case by name."""
    return _models() | _transforms()
