"""Supervised fine-tuning on conversations."""
