"""Configs and measured runs that tests hold the arithmetic to."""
