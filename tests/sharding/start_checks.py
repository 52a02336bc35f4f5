"""Checks of bundles and of second starts on meshes, which `mesh_checks.py` runs."""

import tempfile
from pathlib import Path

import jax

from torchax_serve import EngineOptions, SamplingParams, serve

SIZES = EngineOptions(max_model_len=64, max_num_seqs=2, page_size=8, max_num_batched_tokens=16, max_num_steps=2)
PARAMS = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)


def answers(served, prompts):
    """Tokens of prompts at once and of the longest one again; and how many of its tokens were found, not computed."""
    found = [answer.token_ids for answer in served.generate_batch(prompts, PARAMS)]
    before = served.stats().scheduler.num_hit_tokens
    (again,) = served.generate_batch([max(prompts, key=len)], PARAMS)
    return [*found, again.token_ids], served.stats().scheduler.num_hit_tokens - before


def check_bundles(model_of, prompts, meshes):
    """Yields (mesh, tokens found again) of bundles exported on meshes, each with the tokens of one device.

    Args:
        model_of: Makes the model.
        prompts: Token ids.
        meshes: Pairs of name and shape.
    """
    with serve(model_of(), engine=SIZES) as single:
        wanted = answers(single, prompts)
    assert len({token for row in wanted[0] for token in row}) > 6, wanted
    for name, mesh in meshes:
        with tempfile.TemporaryDirectory() as folder:
            with serve(model_of(), engine=SIZES, mesh=mesh) as served:
                served.export(Path(folder, "bundle"), reference=False)
            with serve(Path(folder, "bundle")) as bundle:
                devices = {len(array.sharding.device_set) for array in bundle.device_weights.values()}
                assert devices == {mesh["model"] * mesh.get("expert", 1)}
                found = answers(bundle, prompts)
        assert found == wanted, f"{name}: {found} is not {wanted}"
        yield name, found[1]


def check_starts(model_of, prompts, meshes):
    """Yields (mesh, programs that XLA had from disk) of second starts of a folder on meshes."""
    hits = []

    def listen(event, **about):
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    with tempfile.TemporaryDirectory() as folder:
        model_of().save_pretrained(folder)
        with serve(folder, engine=SIZES, dtype="float32") as single:
            wanted = answers(single, prompts)
        for name, mesh in meshes:
            for _ in range(2):
                jax.clear_caches()
                hits.clear()
                with serve(folder, engine=SIZES, dtype="float32", mesh=mesh) as served:
                    found = answers(served, prompts)
                    served._runtimes[0].steps.executables.background.wait()
                assert found == wanted, f"{name}: {found} is not {wanted}"
            yield name, len(hits)
