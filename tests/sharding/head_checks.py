"""Checks of draft heads on meshes, which `mesh_checks.py` runs."""

import copy
import tempfile
from pathlib import Path

import gemma_models
import torch
import transformers
from draft_head_oracle import Eagle3, Mtp, PrefixedMtp, trained
from headed_models import deeper, hybrid, llama, prompts, text_of
from speculation_requests import request, tokens_of

from torchax_serve import EngineOptions, serve

SIZES = EngineOptions(max_model_len=96, max_num_seqs=4, page_size=8, max_num_batched_tokens=32, max_num_steps=4)
NUM_STEPS = 30
"""Steps of training, after which drafts of the texts are accepted now and then."""


def headed_model(kind, folder):
    """Returns what `serve` takes: a model, the configuration of its trained head; and greedy texts of the model."""
    if kind == "gemma4":
        model = gemma_models.target_model()
        return model, {"method": "mtp", "model": gemma_models.assistant_model()}, gemma_models.PROMPTS
    if kind == "eagle3":
        model = llama()
        texts = [text_of(model, prompt) for prompt in prompts()]
        head = trained(Eagle3(model, torch.arange(0, model.config.vocab_size, 2)), texts, NUM_STEPS)
        return model, {"method": "eagle3", "model": str(head.save(folder))}, prompts()
    if kind.startswith("qwen3"):
        model, make = hybrid(kind), PrefixedMtp
        head = make(model)
    else:
        head = Mtp(deeper(kind))
        model = transformers.AutoModelForCausalLM.from_pretrained(head.save(folder), attn_implementation="eager")
    texts = [text_of(model, prompt) for prompt in prompts()]
    return trained(head, texts, NUM_STEPS).save(folder), {"method": "mtp"}, prompts()


def check_layout(kind, served):
    """The head's queries and their output lie by heads, and its pages as those of the model."""
    executor = (getattr(served.engine, "engines", None) or [served.engine])[0]._runner._executor
    head = executor._head.loaded if hasattr(executor, "_head") else executor._drafts._head.loaded
    assert "tensors divided by rules" in head.mesh_description
    ends = ("q_proj.weight", "q_b_proj.weight", "o_proj.weight")
    by_heads = [weight for name, weight in head.weights.items() if name.endswith(ends)]
    assert by_heads and not any(weight.is_fully_replicated for weight in by_heads)
    *pools, state = executor.cache.pools
    assert state.hidden.is_fully_replicated
    if kind != "deepseek_v3":  # whose latents have no heads
        assert not any(pool.is_fully_replicated for pool in pools)


def check_heads(kind, meshes):
    """Yields (mesh, drafted, accepted), each as on one device; tokens are those of steps without drafts.

    Args:
        kind: A kind of `headed_model`.
        meshes: Pairs of name and shape.
    """
    with tempfile.TemporaryDirectory() as folder:
        model, config, texts = headed_model(kind, Path(folder) / "head")
        config |= {"num_speculative_tokens": 3, "adaptive": False}
        sizes = {"vocab_size": gemma_models.VOCAB} if kind == "gemma4" else {}

        def served(speculative, mesh=None):
            found = copy.deepcopy(speculative)
            return serve(copy.deepcopy(model), engine=SIZES, mesh=mesh, speculative_config=found)

        def answers(one):
            greedy = [tokens_of(one, [request(text, 16, **sizes)])[0] for text in texts]
            options = {"temperature": 0.7, "do_sample": True, **sizes}
            drawn = tokens_of(one, [request(text[:9], 16, seed=i, **options) for i, text in enumerate(texts)])
            stats = one.stats().scheduler
            return [*greedy, *drawn], (stats.num_draft_tokens, stats.num_accepted_tokens)

        with served(None) as plain:
            wanted, _ = answers(plain)
        with served(config) as single:
            tokens, counts = answers(single)
        assert tokens == wanted
        assert 0 < counts[1] < counts[0], counts
        for name, mesh in meshes:
            with served(config, mesh) as divided:
                found = answers(divided)
                check_layout(kind, divided)
            assert found == (wanted, counts), f"{kind} {name}: {found} is not {(wanted, counts)}"
            yield name, *counts
