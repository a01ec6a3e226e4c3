"""From messages to tokens and back: chat templates, conversations, images, token streams."""
