"""Rollout side of a schedule: sessions, sampling processes, ledgers."""
