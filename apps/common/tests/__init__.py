"""Tests of what the apps' settings, recipes and commands say together."""
