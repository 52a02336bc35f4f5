"""Bundles of modules of any library: numbers of eager PyTorch, from a process without it."""

import json
import shutil
from typing import Annotated

import numpy as np
import pytest
import torch
from exported import output_of
from typer.testing import CliRunner

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import InvalidArgumentError, ModuleModel, UnsupportedModelError, serve
from torchax_serve.cli.main import app


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = torch.nn.Conv1d(4, 8, 3, padding=1), torch.nn.Linear(8, 3)

    def forward(self, x: Annotated[torch.Tensor, "batch", "time", None], scale: float = 1.0):
        mixed = self.mix(x.transpose(1, 2)).transpose(1, 2)
        return {"tags": self.head(mixed.relu()) * scale, "all": [mixed.sum(2), mixed[:, 0]], "scale": scale}


def eager(x, scale=2.0):
    torch.manual_seed(0)
    with torch.no_grad():
        return Tagger()(x, scale)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("modules") / "tagger"
    with serve(Tagger()) as model:
        folder = model.export(out, (torch.ones(1, 8, 4), 2.0), sizes={"batch": (1, 4), "time": (8, 16)})
        assert folder == out / "1"
        plan = model.plan((torch.ones(3, 5, 4),))
    num_weights = sum(each.numel() for each in Tagger().parameters())
    assert (plan.weight_bytes, plan.argument_bytes) == (4 * num_weights, 4 * 4 * 8 * 4)  # 3 rows of 5 are 4 of 8
    flops = 2 * 4 * (4 * 8 * (3 * 8 - 2) + 8 * 8 * 3)  # the convolution leaves zeros at both ends out
    assert plan.flops == pytest.approx(flops, rel=0.2) and "GFLOP" in str(plan)
    return out


RUN = """
import json, numpy as np
from torchax_serve import serve
with serve(sys.argv[1]) as model:
    for rows, length in ((1, 8), (3, 5), (2, 11)):
        x = np.arange(rows * length * 4, dtype=np.float32).reshape(rows, length, 4) / 50
        found = model(x, 2.0)
        print(json.dumps([found["tags"].tolist(), [each.tolist() for each in found["all"]], found["scale"]]))
"""


def test_a_process_without_torch_has_the_numbers_of_eager_pytorch(bundle):
    lines = output_of(RUN, bundle).splitlines()
    for (rows, length), line in zip(((1, 8), (3, 5), (2, 11)), lines, strict=True):
        tags, others, scale = json.loads(line)
        expected = eager(torch.arange(rows * length * 4.0).reshape(rows, length, 4) / 50)
        np.testing.assert_allclose(tags, expected["tags"], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(others, expected["all"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert scale == 2.0


def test_other_calls_than_those_exported_are_refused_by_name(bundle):
    with serve(bundle) as model:
        for arguments, message in (
            ((np.ones((1, 8, 4), np.float32), 3.0), "expected arguments like those of the export"),
            ((np.ones((1, 17, 4), np.float32), 2.0), "expected 1 to 16 in the dimension time"),
            ((np.ones((5, 8, 4), np.float32), 2.0), "expected 1 to 4 in the dimension batch"),
            ((np.ones((1, 8, 5), np.float32), 2.0), r"expected the shape \['batch', 'time', 4\], got \[1, 8, 5\]"),
            ((np.ones((1, 8, 4), np.float16), 2.0), "expected float32, got float16"),
            ((), "missing a required argument: 'x'"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                model(*arguments)


def test_the_command_shows_checks_and_refreshes_it(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)

    def command(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    shown = command("bundle", "info", bundle).stdout
    assert "Tagger, float32" in shown and "programs: 8" in shown  # with and without kernels
    assert command("bundle", "verify", bundle).exit_code == 0
    for arguments, message in (
        (("bundle", "verify", bundle, "--model", EMBEDDED), "--model: expected none with a bundle of a Tagger"),
        (("run", bundle, "a"), "MODEL: expected a model of transformers"),
        (("bench", bundle), "MODEL: expected a model of transformers"),
    ):
        done = command(*arguments)
        assert done.exit_code == 2 and message in done.stderr
    copied = shutil.copytree(bundle, tmp_path / "bundle")
    assert command("bundle", "refresh", copied).exit_code == 0
    x = torch.rand(2, 3, 4)
    with serve(copied) as model:
        np.testing.assert_allclose(model(x.numpy(), 2.0)["tags"], eager(x)["tags"], rtol=1e-4, atol=1e-5)


class Halves(torch.nn.Module):
    def forward(self, x):
        return x[:, ::2]


class Reads(torch.nn.Module):
    def forward(self, x):
        return x[: int(x.sum())]


class Mean(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("module", "dims", "sizes", "error", "message"),
    [
        (
            Halves(),
            ("batch", "time"),
            {"time": (8,)},
            UnsupportedModelError,
            "whose lengths are fixed",
        ),
        (Mean(), ("batch", "time"), {"time": (8,)}, UnsupportedModelError, "depend on zeros behind batch and time"),
        (Reads(), (None, None), {}, UnsupportedModelError, "code does not read the values of tensors, got Reads"),
        (Mean(), ("batch", "time"), {}, InvalidArgumentError, "expected the lengths of 'time' that have programs"),
        (Mean(), ("batch", None), {"time": (8,)}, InvalidArgumentError, "names of dimensions .batch., got 'time'"),
        (Mean(), ("batch", None), {"batch": (0,)}, InvalidArgumentError, "expected lengths from 1"),
    ],
)
def test_what_a_bundle_cannot_hold_is_named(module, dims, sizes, error, message, tmp_path):
    with ModuleModel(module, dims={"x": dims}) as model, pytest.raises(error, match=message):
        model.export(tmp_path / "bundle", (torch.rand(2, 8),), sizes=sizes)
    assert not (tmp_path / "bundle").exists()
