"""How the embedded model is trained: tokenizer, packing, loss through the bridge, optimizer, evaluation, model card."""
