"""How texts become tokens, and hidden states of tokens become one embedding."""
