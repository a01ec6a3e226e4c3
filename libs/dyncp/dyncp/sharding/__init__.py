"""Rows cut over the ranks of a group, and put together again."""
