"""Fully asynchronous schedule: sampling and training wait for each other as little as the bounds allow."""
