"""A tiny Llama from Hugging Face's format to MaxText's and back: logits of PyTorch, MaxText and this project.

python benchmarks/maxtext_conversion.py FOLDER          # with Python 3.12, MaxText and what it imports
python benchmarks/maxtext_conversion.py FOLDER --served  # with this project: logits of both folders

MaxText's own converters run, with a model type that they know and the sizes of the tiny one.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported

import numpy as np

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}
KIND = "llama3.1-8b"
"""Model type in MaxText whose mapping of names is used."""
OVERRIDES = (
    "override_model_config=True",
    "base_emb_dim=64",
    "base_mlp_dim=96",
    "base_num_decoder_layers=3",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=16",
    "vocab_size=256",
    "rope_max_timescale=500000",
    "rope_type=llama3.1",
)
TOLERANCE = 1e-4
IDS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 24))


def made(folder):
    """Saves a random Llama with a tokenizer; returns its logits in PyTorch."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        **SIZES, **HEADS, rms_norm_eps=1e-5, max_position_embeddings=131072, rope_parameters=dict(ROPE)
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.2)
        logits = model(torch.from_numpy(IDS)).logits.numpy()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({str(index): index for index in range(256)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return config, logits


def arguments_of(*more):
    """Returns the command line of MaxText's programs."""
    from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

    base = os.path.join(MAXTEXT_CONFIGS_DIR, "base.yml")
    plain = ("hardware=cpu", "skip_jax_distributed_system=True", "dtype=float32", "weight_dtype=float32")
    exact = ("matmul_precision=highest", "attention=dot_product", "per_device_batch_size=2", "max_target_length=24")
    return ["maxtext", base, f"model_name={KIND}", *OVERRIDES, *plain, *exact, "run_name=tiny", *more]


def maxtext_logits(checkpoint):
    """Returns the logits of MaxText's own model."""
    import jax
    import jax.numpy as jnp
    from maxtext.checkpoint_conversion.utils.utils import load_orbax_checkpoint
    from maxtext.configs import pyconfig
    from maxtext.models import models
    from maxtext.utils import maxtext_utils

    arguments = arguments_of(f"load_parameters_path={checkpoint}", "enable_checkpointing=False")
    config = pyconfig.initialize(arguments)
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    model = models.transformer_as_linen(config, mesh, quant=None)
    params = load_orbax_checkpoint(config)
    while set(params) == {"params"} and "params" in params["params"]:
        params = params["params"]
    ids = jnp.asarray(IDS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    with mesh:
        found = model.apply(params, ids, positions, decoder_segment_ids=jnp.ones_like(ids), enable_dropout=False)
    return np.asarray(found[0] if isinstance(found, tuple) else found)


def convert(folder):
    """Converts both ways and compares weights and logits."""
    from absl import flags
    from maxtext.checkpoint_conversion import to_huggingface, to_maxtext
    from safetensors.numpy import load_file

    config, wanted = made(folder / "hf")
    to_maxtext.HF_MODEL_CONFIGS[KIND] = to_huggingface.HF_MODEL_CONFIGS[KIND] = config
    to_maxtext.main(
        arguments_of(f"base_output_directory={folder / 'maxtext'}"),
        lazy_load_tensors=False,
        hf_model_path=str(folder / "hf"),
        save_dtype="float32",
        simulated_cpu_devices_count=1,
    )
    (items,) = folder.glob("maxtext/**/items")
    report("logits of MaxText", maxtext_logits(items), wanted)
    arguments = arguments_of(f"load_parameters_path={items}", f"base_output_directory={folder / 'back'}")
    flags.FLAGS([arguments[0], f"--hf_model_path={folder / 'hf'}"])
    to_huggingface.main(arguments)
    before = load_file(folder / "hf" / "model.safetensors")
    after = {name: array for file in (folder / "back").glob("*.safetensors") for name, array in load_file(file).items()}
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    equal = sum(np.array_equal(before[name], after[name]) for name in before)
    print(f"{equal} of {len(before)} tensors are bit for bit those of before")
    assert equal == len(before)


def served(folder):
    """Compares logits of this project with PyTorch's, of the folder that was converted twice."""
    import torch
    from transformers import LlamaForCausalLM

    from torchax_serve import to_jax

    with torch.no_grad():
        wanted = LlamaForCausalLM.from_pretrained(folder / "hf")(torch.from_numpy(IDS)).logits.numpy()
        model = to_jax(LlamaForCausalLM.from_pretrained(folder / "back", dtype=torch.float32).eval())
        report("logits here, of what MaxText wrote", model(torch.from_numpy(IDS)).logits.numpy(), wanted)


def report(what, found, wanted):
    difference = float(np.abs(found - wanted).max())
    print(f"{what}: within {difference:.0e} of PyTorch's, whose largest is {np.abs(wanted).max():.1f}", flush=True)
    assert found.shape == wanted.shape and difference < TOLERANCE


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for the checkpoints; with --served that of before")
    parser.add_argument("--served", action="store_true", help="the part of this project")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # MaxText's modules read it
    (served if options.served else convert)(options.folder.resolve())


if __name__ == "__main__":
    main()
