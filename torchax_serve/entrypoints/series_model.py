"""`SeriesModel`: forecasts of series of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError
from torchax_serve.entrypoints.task_model import TaskModel, one_or_all
from torchax_serve.pooling.queue import QueuedTexts
from torchax_serve.tasks.batches import run_batches
from torchax_serve.tasks.results import Forecast
from torchax_serve.validation.argument_hints import refuses_unknown

Series = Sequence[float] | np.ndarray
MAX_VALUES = 1 << 20
"""Most values of a series; models read the last ones, up to their context."""


class SeriesModel(TaskModel):
    """A model that forecasts series (TimesFM); made by `serve`.

    Each length has a program of its own. Series are computed one by one: the model limits its answers by the smallest
    value of all series of a forward.
    """

    @refuses_unknown
    def forecast(
        self,
        series: Series | Sequence[Series],
        *,
        horizon: int | None = None,
        frequency: int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Forecast | list[Forecast]:
        """Returns what comes behind a series; of a list of series a list of those.

        Args:
            series: the values so far, the newest last: one series or several.
            horizon: number of values to come, at most `max_horizon`; None: that many.
            frequency: 0 for values of up to a day, 1 of weeks and months, 2 of quarters and years, where the model
                has an input for it; None: 0.
            timeout_s: seconds after which the call ends with an error, looked at before each forward; None: never.
            queue_timeout_s: the same for a call that has not begun by then.

        Raises:
            UnsupportedModelError: the model does not forecast.
            InvalidArgumentError: values that are no numbers, a gap in a series, a horizon beyond the model's.
            QueueFullError: too many inputs are waiting.
            DeadlineError: a time limit has passed.
        """
        call = self._forecasting(series, horizon, frequency)
        return one_or_all(_is_single(series), call.run(timeout_s, queue_timeout_s))

    @refuses_unknown
    async def aforecast(
        self,
        series: Series | Sequence[Series],
        *,
        horizon: int | None = None,
        frequency: int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Forecast | list[Forecast]:
        """Works as `forecast` without blocking the event loop; cancelling ends it between series."""
        call = self._forecasting(series, horizon, frequency)
        return one_or_all(_is_single(series), await call.run_async(timeout_s, queue_timeout_s))

    @property
    def main_input(self) -> str:
        """Name of the forward's argument for the values."""
        return "past_values"

    @property
    def max_horizon(self) -> int:
        """Most values that a forecast has."""
        return int(self._config.horizon_length)

    def _forecasting(
        self, series: Series | Sequence[Series], horizon: int | None, frequency: int | None
    ) -> QueuedTexts:
        self._head_for("forecast")
        if horizon is not None and (type(horizon) is not int or not 1 <= horizon <= self.max_horizon):
            raise InvalidArgumentError(
                f"horizon: expected a number of values from 1 to {self.max_horizon}, got {horizon!r}; correct it"
            )
        has_frequency = self.runtime.program.accepts("freq")
        if frequency is not None and not (has_frequency and type(frequency) is int and 0 <= frequency <= 2):
            expected = "0, 1 or 2" if has_frequency else f"None for {self.name}, which has no input for it"
            raise InvalidArgumentError(f"frequency: expected {expected}, got {frequency!r}; correct it")
        items = [_checked(each, index) for index, each in enumerate([series] if _is_single(series) else series)]
        levels = tuple(float(each) for each in self._config.quantiles)

        def call(given: Sequence[Any]) -> list[Forecast]:
            inputs = [{"past_values": torch.from_numpy(values)[None].to(self.dtype)} for values in given]
            if has_frequency:
                inputs = [each | {"freq": torch.tensor([frequency or 0])} for each in inputs]
            outputs = run_batches(inputs, self._forward, max_rows=1)
            return [_forecast(each, horizon or self.max_horizon, levels) for each in outputs]

        return self._call_on_queue(("forecast", horizon, frequency), call, items)

    def _forward(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            found = self._module(**batch)
        return {name: found[name] for name in ("mean_predictions", "full_predictions")}


def _forecast(output: dict[str, torch.Tensor], horizon: int, levels: tuple[float, ...]) -> Forecast:
    full = output["full_predictions"][0, :horizon].numpy()
    # The first column is the mean, then one for each level.
    return Forecast(output["mean_predictions"][0, :horizon].numpy(), full[:, 1 : 1 + len(levels)], levels)


def _is_single(series: Any) -> bool:
    """Returns whether `series` is one series, and no list of them."""
    if isinstance(series, np.ndarray):
        return series.ndim == 1
    return not (isinstance(series, Sequence) and len(series) and not isinstance(series[0], (int, float, np.number)))


def _checked(series: Any, index: int) -> np.ndarray:
    """Returns a series as float32[len].

    Raises:
        InvalidArgumentError: it is none, or has a gap.
    """
    where = f"series {index}"
    try:
        values = np.asarray(series, np.float32)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{where}: expected numbers, got {series!r:.60}; correct it") from None
    if values.ndim != 1 or not 1 < len(values) <= MAX_VALUES:
        raise InvalidArgumentError(
            f"{where}: expected 2 to {MAX_VALUES} numbers in a row, got the shape {values.shape}; correct it"
        )
    if not np.isfinite(values).all():
        place = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InvalidArgumentError(
            f"{where}: expected a number in each place, got {values[place]} at {place}; fill gaps first, as by "
            "numpy.interp"
        )
    return values
