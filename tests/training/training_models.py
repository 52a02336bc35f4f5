"""A tiny model with the embedded model's tokenizer, conversations, and what PyTorch makes of them."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from weights import draw_matrices

import torchax_serve
from torchax_serve.training.chats import RowChecks, encode_rows
from torchax_serve.training.packing import Packer

EMBEDDED = Path(torchax_serve.__file__).parent / "embedded"
CHATS = [
    [("user", "What is 3 plus 4?"), ("assistant", "It is 7.")],
    [("user", "Hi"), ("assistant", "Hello!"), ("user", "What is JAX?"), ("assistant", "A library.")],
    [("user", "What is 2 plus 2?"), ("assistant", "4")],
    [("system", "Be brief."), ("user", "Who are you?"), ("assistant", "A small model.")],
    [("user", "Say yes."), ("assistant", "Yes.")],
]


def rows():
    return [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]


def write_data(file):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return file


def tiny_folder(folder, dtype=torch.float32, **changes):
    """A folder with a random Llama of two layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{**sizes, "vocab_size": 1536, "num_key_value_heads": 2, "max_position_embeddings": 256, **changes},
        bos_token_id=2, eos_token_id=1, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    draw_matrices(model, std=0.1)
    model.to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, folder / name)
    return folder


def batches_of(model, options):
    """The batches of a run of a `TrainableModel` on `rows`."""
    examples = encode_rows(model.tokenizer, model.name, rows(), RowChecks(options.seq_len, "all"))
    packer = Packer(examples, options.batch_size, options.seq_len, options.seed, shares_rows=options.packing)
    return [packer.batch(step) for step in range(options.num_steps)]


def torch_steps(module, batches, learning_rate):
    """Losses of AdamW in PyTorch, each example of a row by itself, so that packing and masks are not part of it."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    losses = []
    for batch in batches:
        total, count = 0.0, 0
        for tokens, segments, learned in zip(batch.tokens, batch.segments, batch.learned, strict=True):
            for number in range(1, int(segments.max()) + 1):
                here = segments == number
                ids = torch.from_numpy(tokens[here]).long()[None]
                marks = torch.from_numpy(np.asarray(learned[here])).bool()[None, 1:]
                logits = module(input_ids=ids, use_cache=False).logits.float()[:, :-1]
                total = total + torch.nn.functional.cross_entropy(logits[marks], ids[:, 1:][marks], reduction="sum")
                count += int(marks.sum())
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
