"""The exactness matrix: every cell against one process, over real ranks."""
