"""Rematerialization: less memory for activations by the compiled step's own account, and the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_models import tiny_folder

from torchax_serve.training import TrainingOptions
from torchax_serve.training.inputs import inputs_of
from torchax_serve.training.packing import TrainingBatch
from torchax_serve.training.step import TrainState, make_step
from torchax_serve.training.trainable import trainable_model

NUM_LAYERS, SHAPE = 6, (1, 4, 128)
ACTIVATIONS_BYTES = NUM_LAYERS * SHAPE[1] * SHAPE[2] * 2 * 64 * 4
"""Float32 outputs of the two wide matrices of each layer's MLP: the least that a step without remat stores."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=NUM_LAYERS)


def compiled_step(folder, remat):
    options = TrainingOptions(num_steps=1, batch_size=4, seq_len=128, packing=False, remat=remat)
    model, optimizer = trainable_model(folder, None, options), optax.sgd(1.0)  # so that the change is the gradient
    tokens = np.random.default_rng(0).integers(3, 1500, SHAPE, dtype=np.int32)
    positions = np.broadcast_to(np.arange(SHAPE[2], dtype=np.int32), SHAPE)
    batch = TrainingBatch(tokens, np.ones_like(tokens), positions, np.ones_like(tokens))
    state = TrainState(jnp.zeros((), jnp.int32), model.trained, optimizer.init(model.trained))
    step = jax.jit(make_step(model, inputs_of(model, packing=False), optimizer, None))
    compiled = step.lower(state, model.frozen, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes, compiled(state, model.frozen, batch)


def test_it_stores_less_and_computes_the_same(folder):
    stored, (state, result) = compiled_step(folder, remat=False)
    fewer, (again, other) = compiled_step(folder, remat=True)
    assert stored - fewer > ACTIVATIONS_BYTES / 2, (stored, fewer)
    np.testing.assert_allclose(other["loss"], result["loss"], rtol=1e-6)
    np.testing.assert_allclose(other["grad_norm"], result["grad_norm"], rtol=1e-5)
    for name, array in again.trained.items():
        np.testing.assert_allclose(array, state.trained[name], rtol=1e-4, atol=1e-5)
