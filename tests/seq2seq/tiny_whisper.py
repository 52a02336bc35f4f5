"""A Whisper that is tiny and random, and whose choices are clear."""

import torch
import transformers
from weights import draw_matrices

VOCAB_SIZE, WIDTH = 60, 32


def tiny_whisper(*, encoder_layers=2, num_mel_bins=80, max_source_positions=100, vocab_size=VOCAB_SIZE, **generation):
    """The model in eager PyTorch; `generation` are attributes of its generation config."""
    config = transformers.WhisperConfig(
        vocab_size=vocab_size,
        d_model=WIDTH,
        encoder_layers=encoder_layers,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=num_mel_bins,
        max_source_positions=max_source_positions,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    draw_matrices(model, std=0.3)
    model.generation_config.update(pad_token_id=0, max_length=40)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False  # else transformers does not read these again
    return model
