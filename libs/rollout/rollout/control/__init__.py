"""Asynchronous training: who may begin, what is trained, when weights move; and a simulation of it."""
