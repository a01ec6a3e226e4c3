"""A lean forward pass over the weights of a Hugging Face module, and the slots its rows decode in."""
