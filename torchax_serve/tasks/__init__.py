"""Tasks of models with heads for images, sound and series: inputs, batches, results."""
