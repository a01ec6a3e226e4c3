"""A --help that small runs can read: the many flags of `cluster` are one line, unless --help-cluster asks for them."""

from collections.abc import Sequence

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from apps.common.cluster import Cluster

HELP_CLUSTER = "--help-cluster"


def help_flags(argv: Sequence[str]) -> tuple[list[str], ConstructorRegistry | None]:
    """Return the flags for the parser, and the registry that shortens its help where --help is among them."""
    if HELP_CLUSTER in argv:
        return ["--help"], None
    return list(argv), _short() if {"--help", "-h"} & set(argv) else None


def _short() -> ConstructorRegistry:
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def one_line(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Cluster] | None:
        if not (isinstance(info.type, type) and issubclass(info.type, Cluster)):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=HELP_CLUSTER,
            instance_from_str=lambda _: Cluster(),
            is_instance=lambda value: isinstance(value, Cluster),
            str_from_instance=lambda _: ["as the recipe has it"],
        )

    return registry
