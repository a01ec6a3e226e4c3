"""Environments in processes of their own: a pool, the messages, and what runs in each process."""
