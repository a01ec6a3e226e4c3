"""Attention and the gated delta rule over the ranks of a group."""
