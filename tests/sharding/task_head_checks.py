"""Checks of models with heads for tasks on meshes, which `mesh_checks.py` runs."""

import contextlib
import copy
import functools

import torch
import transformers as tf
from weights import draw_matrices

from torchax_serve import UnsupportedModelError, serve
from torchax_serve.entrypoints.task_model import TaskModel

NUM_LABELS = 91
"""More than words: 91 labels that no number of devices divides."""
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 66}
WORDS = {"vocab_size": 61, "max_position_embeddings": 32}
CONVOLUTIONS = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16}


def _image(size=32):
    return {"pixel_values": torch.randn(2, 3, size, size)}


def _text():
    return {"input_ids": torch.randint(3, 61, (2, 7))}


MODELS = {
    # Labels of a model whose configuration has a vocabulary of 61.
    "wav2vec2": lambda: (
        tf.Wav2Vec2ForSequenceClassification(
            tf.Wav2Vec2Config(
                **SIZES, **CONVOLUTIONS, vocab_size=61, num_conv_pos_embedding_groups=4, num_labels=NUM_LABELS
            )
        ),
        {"input_values": torch.randn(2, 1600)},
    ),
    "vit": lambda: (
        tf.ViTForImageClassification(tf.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=NUM_LABELS)),
        _image(),
    ),
    # No embedding of words or patches that the class knows, and convolutions.
    "resnet": lambda: (
        tf.ResNetForImageClassification(
            tf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 24], depths=[1, 1], num_labels=NUM_LABELS)
        ),
        _image(),
    ),
    "segformer": lambda: (
        tf.SegformerForSemanticSegmentation(
            tf.SegformerConfig(
                hidden_sizes=[8, 16, 24, 32],
                depths=[1, 1, 1, 1],
                num_attention_heads=[1, 2, 2, 4],
                decoder_hidden_size=18,
                num_labels=NUM_LABELS,
            )
        ),
        _image(64),
    ),
    # Heads behind models that have a table of rules.
    "llama": lambda: (
        tf.LlamaForTokenClassification(tf.LlamaConfig(**SIZES, **WORDS, num_key_value_heads=2, num_labels=NUM_LABELS)),
        _text(),
    ),
    "gpt2": lambda: (
        tf.GPT2ForQuestionAnswering(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=61)),
        _text(),
    ),
    # A table knows the model, by another name than it has here.
    "mixtral": lambda: (
        tf.MixtralForQuestionAnswering(
            tf.MixtralConfig(
                **{**SIZES, "intermediate_size": 64},  # PyTorch's own product of experts takes multiples of 16 bytes
                **WORDS,
                num_key_value_heads=2,
                num_local_experts=4,
                num_experts_per_tok=2,
            )
        ),
        _text(),
    ),
}


class _Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.up, self.down = torch.nn.Conv2d(3, 64, 3), torch.nn.Linear(64, 256), torch.nn.Linear(256, 5)

    def forward(self, x):
        return self.down(self.up(self.mix(x).mean((2, 3))).relu())


@torch.no_grad()
def check_module(meshes):
    """Yields each mesh on which a module of one's own has the result of eager PyTorch."""
    torch.manual_seed(0)
    module, x = _Mlp(), torch.randn(8, 3, 6, 6)
    wanted = module(x)
    for mesh in meshes:
        with serve(copy.deepcopy(module), mesh=mesh) as model:
            torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
            divided = [name for name, each in model._runtime.weights.items() if not each.is_fully_replicated]
            assert divided == (["mix.weight", "up.weight", "down.weight"] if mesh.get("model") else [])
            for refused in (model.plan, functools.partial(model.export, "folder")):
                with contextlib.suppress(UnsupportedModelError):
                    refused((x,))
                    raise AssertionError("expected an error")
        yield mesh


@torch.no_grad()
def check_task_heads(kind, degrees):
    """Yields each number of devices on which every tensor of the output is that of eager PyTorch."""
    torch.manual_seed(0)
    model, inputs = MODELS[kind]()
    draw_matrices(model.eval(), std=0.2)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = {name: value for name, value in model(**inputs).items() if isinstance(value, torch.Tensor)}
    for degree in degrees:
        own = type(model)(model.config).eval()
        own.load_state_dict(weights)
        with serve(own, tensor_parallel=degree) as served:
            found = served(**inputs)
            divided = [name for name, each in served.runtime.weights.items() if not each.is_fully_replicated]
            if isinstance(served, TaskModel):
                _check_refusals({"plan": served.plan, "export": functools.partial(served.export, "folder")})
        assert divided, "expected weights that are divided"
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)
        yield degree


def _check_refusals(calls):
    """Checks that calls say, each under its name, that they are for one device."""
    for name, call in calls.items():
        try:
            call()
        except UnsupportedModelError as error:
            assert str(error).startswith(f"{name}: expected a model on one device"), error
        else:
            raise AssertionError(f"expected an error of {name}")
