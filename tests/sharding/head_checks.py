"""Checks of draft heads on meshes, which `mesh_checks.py` runs."""

import copy
import dataclasses
import tempfile
from pathlib import Path

import gemma_models
import torch
import transformers
from draft_head_oracle import Eagle3, Mtp, PrefixedMtp, trained
from headed_models import NUM_NEW, deeper, hybrid, llama, prompts, text_of
from speculation_requests import request, tokens_of

from torchax_serve import EngineOptions, serve
from torchax_serve.kv_cache.hybrid_cache import HybridCache

SIZES = EngineOptions(max_model_len=96, max_num_seqs=4, page_size=8, max_num_batched_tokens=32, max_num_steps=4)
HYBRID_SIZES = dataclasses.replace(SIZES, max_model_len=48, max_num_seqs=1)
"""Of models with recurrent states, whose programs are many and large: a verify step has two forwards of the model, and
each number of rows has one."""

NUM_STEPS, NUM_HYBRID_STEPS = 30, 6
"""Steps of training, after which drafts of the texts are accepted now and then."""


def headed_model(kind, folder):
    """Returns what `serve` takes: a model, the configuration of its trained head; and greedy texts of eager PyTorch."""
    if kind == "gemma4":
        model, asked = gemma_models.target_model(), gemma_models.PROMPTS
        texts = [gemma_models.generated(model, prompt) for prompt in asked]
        return model, {"method": "mtp", "model": gemma_models.assistant_model()}, texts
    if kind == "eagle3":
        model = llama()
        head = Eagle3(model, torch.arange(0, model.config.vocab_size, 2))
    elif kind.startswith("qwen3"):
        model = hybrid(kind, num_layers=2)
        head = PrefixedMtp(model)
    else:
        head = Mtp(deeper(kind))
        model = transformers.AutoModelForCausalLM.from_pretrained(head.save(folder), attn_implementation="eager")
    asked = prompts((2, 8)) if kind.startswith("qwen3") else prompts()
    texts = [text_of(model, prompt) for prompt in asked]
    saved = trained(head, texts, NUM_HYBRID_STEPS if kind.startswith("qwen3") else NUM_STEPS).save(folder)
    return (
        (model, {"method": "eagle3", "model": str(saved)}, texts)
        if kind == "eagle3"
        else (saved, {"method": "mtp"}, texts)
    )


def check_layout(kind, served):
    """The head's queries and their output lie by heads, and its pages as those of the model."""
    executor = (getattr(served.engine, "engines", None) or [served.engine])[0]._runner._executor
    head = executor._head.loaded if hasattr(executor, "_head") else executor._drafts._head.loaded
    assert "tensors divided by rules" in head.mesh_description
    ends = ("q_proj.weight", "q_b_proj.weight", "o_proj.weight")
    by_heads = [weight for name, weight in head.weights.items() if name.endswith(ends)]
    assert by_heads and not any(weight.is_fully_replicated for weight in by_heads)
    cache = executor.cache
    assert cache.pools[-1].hidden.is_fully_replicated
    pages = cache.pages_of_layers(range(len(cache.plan.shapes)))
    if kind not in ("deepseek_v3", "glm_moe_dsa"):  # whose latents have no heads
        assert not any(pool.is_fully_replicated for pool in pages)
    if isinstance(cache, HybridCache):
        num_parts = pages[0].sharding.mesh.shape["model"]
        for kept, state in zip(cache.recurrent.states, cache.states_of_prefixes(), strict=True):
            divided = state.shape[1 if kept.is_of_heads else 2]  # heads, or channels of a convolution
            assert state.is_fully_replicated == bool(divided % num_parts)


def check_heads(kind, meshes):
    """Yields (mesh, drafted, accepted), each as on one device; greedy tokens are those of eager PyTorch.

    Args:
        kind: A kind of `headed_model`.
        meshes: Pairs of name and shape.
    """
    with tempfile.TemporaryDirectory() as folder:
        model, config, texts = headed_model(kind, Path(folder) / "head")
        config |= {"num_speculative_tokens": 3, "adaptive": False}
        sizes = {"vocab_size": gemma_models.VOCAB} if kind == "gemma4" else {}
        num_new = gemma_models.NUM_NEW if kind == "gemma4" else NUM_NEW

        def answers(mesh):
            own = copy.deepcopy(model), copy.deepcopy(config)
            engine = HYBRID_SIZES if kind.startswith("qwen3") else SIZES
            with serve(own[0], engine=engine, mesh=mesh, speculative_config=own[1]) as served:
                served.engine.check_integrity = True
                greedy = [request(text[:-num_new], num_new, **sizes) for text in texts]
                options = {"temperature": 0.7, "do_sample": True, **sizes}
                drawn = [request(text[:9], 16, seed=i, **options) for i, text in enumerate(texts)]
                found = [tokens_of(served, [each])[0] for each in greedy]  # of one request, whose drafts no other stops
                stats = served.stats().scheduler
                assert found == [text[-num_new:] for text in texts]
                if mesh is not None:
                    check_layout(kind, served)
                return tokens_of(served, drawn), (stats.num_draft_tokens, stats.num_accepted_tokens)

        wanted = answers(None)
        assert 0 < wanted[1][1] < wanted[1][0], wanted[1]
        for name, mesh in meshes:
            found = answers(mesh)
            assert found == wanted, f"{kind} {name}: {found} is not {wanted}"
            yield name, *wanted[1]
