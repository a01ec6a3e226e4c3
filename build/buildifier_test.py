"""The formatter's archive: what has another hash is refused, and the binary is that of this processor."""

import base64
import hashlib
import io
import tarfile

import pytest
from buildifier import binary_in


def archive(files: dict[str, bytes]) -> bytes:
    """A tar file as npm makes them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


PACKED = archive({"package/buildifier-linux_amd64": b"one", "package/buildifier-linux_arm64": b"two"})
INTEGRITY = "sha512-" + base64.b64encode(hashlib.sha512(PACKED).digest()).decode()


def test_the_binary_is_that_of_the_processor() -> None:
    """Both lie in one archive."""
    assert binary_in(PACKED, INTEGRITY, "x86_64") == b"one"
    assert binary_in(PACKED, INTEGRITY, "aarch64") == b"two"


def test_another_archive_is_refused() -> None:
    """Though it holds a binary."""
    with pytest.raises(ValueError, match=r"build/buildifier\.py lists"):
        binary_in(archive({"package/buildifier-linux_amd64": b"three"}), INTEGRITY, "x86_64")


def test_a_processor_without_one_is_said() -> None:
    """By name."""
    with pytest.raises(ValueError, match="no buildifier for s390x"):
        binary_in(PACKED, INTEGRITY, "s390x")
