from dataclasses import dataclass, field, fields

import pytest
import tyro

from apps.common.cli.flags import as_type, changed, check_owned, flag, flag_type, leaves


@dataclass(frozen=True)
class Inner:
    """An inner one."""

    path: str | None = None
    """Not shown."""
    rate: float = 1.0
    """Shown."""
    kind: str = "a"

    def __post_init__(self) -> None:
        assert [type(f.type) for f in fields(self)]  # the class's own types are untouched
        if self.rate < 0:
            raise ValueError("rate must be at least 0")


@dataclass(frozen=True)
class Outer:
    """An outer one."""

    steps: int = 3
    inner: Inner = field(default_factory=Inner)


OWNED = {"inner.path": "use --path"}


def parse(*argv: str, default: Outer = Outer()) -> Outer:
    kind = flag_type(Outer, OWNED, {})
    return as_type(tyro.cli(kind, default=as_type(default, kind), args=argv), Outer)


def test_values_come_back_in_the_classes_of_the_library() -> None:
    parsed = parse("--inner.rate", "2", default=Outer(steps=5))
    assert parsed == Outer(5, Inner(rate=2.0))
    assert type(parsed.inner) is Inner


def test_an_owned_field_has_no_flag_and_keeps_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--inner.path", "x")
    assert parse(default=Outer(inner=Inner(path="y"))).inner.path == "y"
    with pytest.raises(SystemExit):
        parse("--help")
    printed = capsys.readouterr().out
    assert "--inner.rate" in printed
    assert "Shown." in printed
    assert "--inner.path" not in printed


def test_the_library_class_is_left_alone() -> None:
    before = dict(Inner.__annotations__)
    flag_type(Outer, OWNED, {"inner.kind": int})
    assert Inner.__annotations__ == before


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="Inner has no field nowhere"):
        flag_type(Outer, {"inner.nowhere": "x"}, {})


def test_owned_fields_are_refused_where_a_configuration_is_made() -> None:
    check_owned(Outer(), OWNED)
    with pytest.raises(ValueError, match=r"--inner\.path is not for you to set: use --path"):
        check_owned(Outer(inner=Inner(path="x")), OWNED)


def test_leaves_and_changes() -> None:
    assert [path for path, _, _ in leaves(Outer())] == ["steps", "inner.path", "inner.rate", "inner.kind"]
    assert changed(Outer(), Outer(steps=4, inner=Inner(rate=3.0))) == ["steps", "inner.rate"]
    assert flag("inner.some_name") == "--inner.some-name"
    assert (flag("data.data"), flag("data.eval_data")) == ("--data", "--eval-data")
