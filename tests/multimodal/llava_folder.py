"""A folder with a tiny Llava: random weights, a tokenizer of words, a processor with a chat template."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

IMAGE_TOKEN = 3
WORDS = ["<pad>", "</s>", "<unk>", "<image>", "USER:", "ASSISTANT:", "What", "is", "this", "?"]
WORDS += [f"word{index}" for index in range(len(WORDS), 64)]
TEMPLATE = (
    "{% for m in messages %}USER: {% for part in m.content %}{% if part.type == 'image' %}<image> "
    "{% else %}{{ part.text }}{% endif %}{% endfor %} ASSISTANT:{% endfor %}"
)


def make(folder):
    """Writes the folder; returns the model in eager PyTorch."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=64, max_position_embeddings=128, eos_token_id=None, **sizes),
        vision_config=CLIPVisionConfig(image_size=16, patch_size=4, **sizes),
        image_token_index=IMAGE_TOKEN,
    )
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", additional_special_tokens=["<image>"]),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    torch.manual_seed(1)
    model = LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.4 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model
