"""How a model is trained, and what is done with the result."""
