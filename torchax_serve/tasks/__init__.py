"""Tasks of models with heads for images and sound: inputs, batches, results."""
