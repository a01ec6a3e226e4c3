"""The names of the ways to communicate in context-parallel attention."""

from typing import Literal

Method = Literal["ring", "ulysses", "all_gather"]
METHODS: tuple[Method, ...] = ("ring", "ulysses", "all_gather")
