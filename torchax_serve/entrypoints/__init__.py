"""Public entry points: `serve` and the models that it returns."""
