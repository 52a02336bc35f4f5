"""What users hold: `serve` and the models that it returns."""
