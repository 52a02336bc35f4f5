"""A folder with a tiny GLM-ASR: random weights, a tokenizer of words, a processor with a chat template."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GlmAsrConfig,
    GlmAsrForConditionalGeneration,
    GlmAsrProcessor,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
)

RATE = 16_000
WORDS = ["<pad>", "</s>", "<unk>", "<|pad|>", "USER:", "ASSISTANT:", "Please", "transcribe", "What", "is", "this", "?"]
TEMPLATE = (
    "{% for m in messages %}USER: {% for part in m.content %}{% if part.type == 'audio' %}<|pad|> "
    "{% else %}{{ part.text }}{% endif %}{% endfor %} ASSISTANT:{% endfor %}"
)


def make(folder):
    """Writes the folder; returns the model in eager PyTorch."""
    words = [*WORDS, *(f"w{index}" for index in range(64 - len(WORDS)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = GlmAsrConfig(
        audio_config={"num_mel_bins": 16, "intermediate_size": 128, "head_dim": 8, **sizes},
        text_config={
            "model_type": "llama",
            "vocab_size": 64,
            "intermediate_size": 48,
            "max_position_embeddings": 256,
            "eos_token_id": None,
            **sizes,
        },
        audio_token_id=3,
    )
    processor = GlmAsrProcessor(
        WhisperFeatureExtractor(feature_size=16, chunk_length=2, sampling_rate=RATE),
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", additional_special_tokens=["<|pad|>"]
        ),
        chat_template=TEMPLATE,
    )
    torch.manual_seed(4)
    model = GlmAsrForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.4 * parameter[0].numel() ** -0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model
