"""What `--teacher` names, by environment."""

import pytest

from apps.common.teacher_source import TeacherSource, teacher_sources


@pytest.mark.parametrize(
    ("text", "kind", "place"),
    [
        ("self", "self", ""),
        ("models/big", "engine", "models/big"),
        ("OWNER/NAME@main", "engine", "OWNER/NAME@main"),
        ("native:models/big", "native", "models/big"),
        ("vllm:models/big", "vllm", "models/big"),
        ("http://127.0.0.1:8000/", "server", "http://127.0.0.1:8000"),
        ("https://teacher.example/v1", "server", "https://teacher.example/v1"),
    ],
)
def test_a_teacher_is_read(text: str, kind: str, place: str) -> None:
    source = TeacherSource.of(text)
    assert (source.kind, source.place) == (kind, place)
    assert str(source) == text.rstrip("/")
    assert source.uses_rollout == (kind in ("native", "vllm", "server"))


def test_teachers_of_environments() -> None:
    assert teacher_sources(["a/b=c"]) == {"": TeacherSource("engine", "a/b=c")}
    found = teacher_sources(["math=vllm:DIR", "code=http://127.0.0.1:8000", "talk=self"])
    assert {name: source.kind for name, source in found.items()} == {"math": "vllm", "code": "server", "talk": "self"}
    assert teacher_sources(["math=DIR"]) == {"math": TeacherSource("engine", "DIR")}
    for given, message in ((["a", "b"], "is not NAME=VALUE"), (["a=b", "a=c"], "names a twice")):
        with pytest.raises(ValueError, match=message):
            teacher_sources(given)
