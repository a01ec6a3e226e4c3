"""The chat templates of real models, and how each is checked."""
