"""The libraries are kept as house.py says, and a planted fault of each kind is found and named."""

from pathlib import Path

import pytest
from house import HARD, ROOM, check_house

ROOT = Path(__file__).parents[1]
NUMBERED = '"""Packs.\n\n1. Sort.\n2. Fill.\n\nHeld by tests: all of it."""\n'
HEADS = dict.fromkeys(HARD, NUMBERED)
PACKAGES = {f"{folder}/__init__.py": "" for path in HARD for folder in [path.rpartition("/")[0]]}
CLEAN = HEADS | PACKAGES


def test_the_libraries_are_kept_so() -> None:
    """Whatever the test was given of them: their files without the tests."""
    files = [path for path in sorted((ROOT / "libs").glob("*/*/**/*.py")) if not path.name.endswith("_test.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    assert len(texts) > 300
    assert check_house(texts) == []


def test_a_clean_house_has_no_complaint() -> None:
    assert check_house(CLEAN) == []


EXPORTS = '_EXPORTS = {"plan": "x.search", "Plan": "x.search"}\n'
SOME = "libs/x/x/some.py"
PLANTED = [
    ({"libs/x/x/__init__.py": EXPORTS, "libs/x/x/plan/__init__.py": ""}, "plan is public, and a module"),
    ({"libs/x/x/__init__.py": EXPORTS, "libs/x/x/plan.py": ""}, "plan is public, and a module"),
    ({f"libs/x/x/m{i}.py": "" for i in range(ROOM + 1)}, f"libs/x/x: {ROOM + 1} modules, more than {ROOM}"),
    ({f"apps/x/m{i}.py": "" for i in range(ROOM + 1)}, f"apps/x: {ROOM + 1} modules, more than {ROOM}"),
    ({"libs/x/x/room/a.py": ""}, "libs/x/x/room: no __init__.py"),
    ({"apps/x/benchmarks/a.py": ""}, "apps/x/benchmarks: no __init__.py"),
    ({HARD[0]: '"""Packs."""'}, f"{HARD[0]}: its head has no strategy in numbered steps"),
    ({HARD[0]: '"""Packs.\n\n1. Sort.\n2. Fill."""'}, f"{HARD[0]}: its head does not say what tests hold"),
    ({SOME: "silent_rows = 1"}, "some.py:1: 'silent_rows' has a plainer name"),
    *(
        ({SOME: f'def f():\n    """{opening} are in it."""'}, f"some.py:1: f: begins with '{opening}': write a verb")
        for opening in ("What", "Whether", "The", "Returns", "Rows", "ValueError", "`rows`", "1.5")
    ),
    ({SOME: 'class A:\n    async def f(self):\n        """Where they are."""'}, "some.py:2: f: begins with 'Where'"),
    ({SOME: 'class A:\n    """Counts the rows."""'}, "some.py:1: A: begins with 'Counts', a verb in the third person"),
    ({SOME: 'class A:\n    x: int = 1\n    """Carries `rows`."""'}, "some.py:2: x: begins with 'Carries'"),
    ({SOME: 'X = 1\n"""Takes all of it."""'}, "some.py:1: X: begins with 'Takes'"),
    (
        {SOME: 'class A:\n    @property\n    def f(self):\n        """Gives one."""'},
        "some.py:3: f: begins with 'Gives'",
    ),
    ({"build/some.py": 'def f():\n    """What it is."""'}, "build/some.py:1: f: begins with 'What'"),
    *(
        ({"libs/rollout/rollout/some.py": text}, f"some.py:1: {what} runs what another process sends")
        for text, what in (
            ("import pickle", "pickle"),
            ("from cloudpickle import loads", "cloudpickle"),
            ("connection.recv()", "connection.recv"),
            ("torch.load(path)", "torch.load"),
            ("numpy.load(path, allow_pickle=True)", "numpy.load"),
        )
    ),
    ({SOME: "dist.all_gather_object(every, mine)"}, "some.py:1: all_gather_object pickles between ranks"),
    ({SOME: "from torch.distributed import gather_object"}, "some.py:1: gather_object pickles between ranks"),
    ({SOME: "def f():\n    import json"}, "some.py:2: import json: move it to the top"),
    ({SOME: "if TYPE_CHECKING:\n    from a import b"}, "some.py:2: from a import b: move it to the top"),
    ({SOME: "class A:\n    def f(self):\n        if 1:\n            import json"}, "some.py:4: import json"),
    ({"apps/x/some.py": "async def f():\n    import json"}, "apps/x/some.py:2: import json"),
]


@pytest.mark.parametrize(("files", "complaint"), PLANTED)
def test_a_planted_fault_is_named(files: dict[str, str], complaint: str) -> None:
    found = [one for one in check_house(CLEAN | {"libs/x/x/__init__.py": ""} | files) if complaint in one]
    assert len(found) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import json",
        "def f():\n    import json  # a second",
        "def f():\n    # a second\n    import json",
        "def f():\n    import megatron.core",
        "def f():\n    try:\n        import json\n    except ImportError:\n        return None",
        "if TYPE_CHECKING:  # they import one another\n    from a import b",
        'class A:\n    """Counts of rows."""\n    x = 1\n    """Returns of episodes."""',
        'def f():\n    """Return what is left."""',
        'def f():\n    """See `g`."""',
        'class A:\n    @property\n    def f(self):\n        """The rows."""',
        'class A:\n    @functools.cached_property\n    def f(self):\n        """Rows."""',
        '@typing.overload\ndef f():\n    """For rows."""',
        'def visit_Name(self):\n    """A name."""\n\n\ndef __len__(self):\n    """Rows."""',
    ],
)
def test_what_is_meant_to_be_so_is_left_alone(text: str) -> None:
    assert check_house(CLEAN | {"libs/x/x/__init__.py": "", SOME: text}) == []


def test_tests_may_be_many() -> None:
    """Test files anywhere, and what they share in a folder of tests."""
    many = {f"apps/x/m{i}_test.py": "" for i in range(ROOM + 1)}
    many |= {f"apps/x/tests/m{i}.py": "" for i in range(ROOM + 1)}
    assert check_house(CLEAN | {"apps/x/__init__.py": "", "apps/x/tests/__init__.py": ""} | many) == []


def test_a_facade_names_what_it_hands_out_for_type_checkers() -> None:
    text = "if TYPE_CHECKING:\n    from x.some import f as f\n"
    assert check_house(CLEAN | {"libs/x/x/__init__.py": text}) == []
