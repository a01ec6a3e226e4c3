"""Messages to tokens and loss masks."""
