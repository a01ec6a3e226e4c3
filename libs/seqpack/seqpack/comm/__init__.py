"""Plain data between ranks: JSON, and never a pickle."""
