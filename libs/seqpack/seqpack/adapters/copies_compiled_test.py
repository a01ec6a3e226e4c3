"""Packed rows of a hybrid model whose forward is compiled."""

from seqpack.adapters.copies_test import assert_compiled


def test_compiled_packed_rows() -> None:
    assert_compiled("qwen3_5_text")
