"""Forecasts beside eager PyTorch."""

import asyncio

import numpy as np
import pytest
import torch

from torchax_serve import InvalidArgumentError, SeriesModel, UnsupportedModelError, serve

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),  # TimesFM's own code
]


def test_forecast(folders):
    path, eager = folders("timesfm")
    times = np.arange(100)
    series = [np.sin(times[:40] / 3), 5 + np.cos(times / 5)]

    def theirs(values, frequency=0):
        with torch.no_grad():
            given = [torch.tensor(values, dtype=torch.float32)]
            return eager(past_values=given, freq=torch.tensor([frequency]))

    with serve(path) as served:
        assert isinstance(served, SeriesModel) and served.methods == ("forecast",) and served.max_horizon == 32
        for found, values in zip(served.forecast(series), series, strict=True):
            expected = theirs(values)
            np.testing.assert_allclose(found.mean, expected.mean_predictions[0], atol=1e-4)
            np.testing.assert_allclose(found.quantiles, expected.full_predictions[0][:, 1:], atol=1e-4)
            assert found.levels == tuple(eager.config.quantiles)
        found = asyncio.run(served.aforecast(list(series[0]), horizon=3, frequency=2))
        np.testing.assert_allclose(found.mean, theirs(series[0], 2).mean_predictions[0][:3], atol=1e-4)
        for values, options, message in [
            (series[0], {"horizon": 33}, "horizon: expected a number of values from 1 to 32, got 33"),
            (series[0], {"frequency": 3}, "frequency: expected 0, 1 or 2, got 3"),
            ([1.0, np.nan, 2.0], {}, "series 0: expected a number in each place, got nan at 1; fill gaps"),
            ([[1.0, 2.0], [1.0]], {}, "series 1: expected 2 to"),
            (["a", "b"], {}, "series 0: expected numbers, got 'a'"),
        ]:
            with pytest.raises(InvalidArgumentError, match=message):
                served.forecast(values, **options)
        with pytest.raises(UnsupportedModelError, match="whose methods are forecast"):
            served._head_for("speak")
