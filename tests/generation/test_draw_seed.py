"""Seeds of rows: torch's global generator, or that of the call's thread."""

import torch

from torchax_serve.generation.call_limits import draw_seed, seeds_from


def test_a_call_on_a_thread_draws_from_its_own_generator_alone():
    with seeds_from(torch.Generator().manual_seed(3)):
        expected = [draw_seed(do_sample=True), draw_seed(None, do_sample=True)]
    torch.manual_seed(5)  # what other threads have drawn meanwhile
    state = torch.get_rng_state()
    with seeds_from(torch.Generator().manual_seed(3)):
        assert [draw_seed(None, do_sample=True), draw_seed(do_sample=True)] == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_is_kept_drawn_by_torchs_generator_or_zero():
    torch.manual_seed(7)
    drawn = draw_seed(do_sample=True)
    torch.manual_seed(7)
    assert draw_seed(do_sample=True) == drawn != draw_seed(do_sample=True)
    assert draw_seed(11, do_sample=True) == 11
    assert draw_seed(do_sample=False) == draw_seed(do_sample=None) == 0
