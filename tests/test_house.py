"""The house keeps its shape: imports go one way, the error tree is the one that is drawn, nothing private leaks."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from sandmill import errors

SOURCE = Path(__file__).parent.parent / "src" / "sandmill"
FLOORS = (
    {"errors", "config"},
    {"sandboxes", "accounts", "store"},
    {"environments", "models"},
    {"rollouts"},
    {"training"},
    {"reports"},
    {"server"},
    {"cli"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imports_of(path: Path) -> set[str]:
    """Rooms that a module imports, TYPE_CHECKING and function-level imports included."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        rooms |= {name.split(".")[1] for name in names if name.startswith("sandmill.")}
    return rooms & FLOOR_OF.keys()


def test_every_room_has_a_floor() -> None:
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists())}
    assert rooms - {"__init__", "__main__"} == FLOOR_OF.keys()


@pytest.mark.parametrize("room", sorted(FLOOR_OF))
def test_imports_go_one_way(room: str) -> None:
    paths = [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else sorted((SOURCE / room).rglob("*.py"))
    upward = {
        f"{path.relative_to(SOURCE)} imports {other}" for path in paths for other in imports_of(path) if FLOOR_OF[other] > FLOOR_OF[room]
    }
    assert not upward


def test_a_back_edge_would_be_seen(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text("def f():\n    from sandmill.training import learner\n    return learner\n")
    assert imports_of(sample) == {"training"}


def test_the_drawn_error_tree_is_the_real_one() -> None:
    drawn = {word for line in inspect.getdoc(errors).splitlines() for word in line.replace("├", " ").split() if word in vars(errors)}  # type: ignore[union-attr]
    real = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.SandmillError)}
    assert drawn == real


def test_every_leaf_is_also_the_fitting_builtin() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.SandmillError)]
    leaves = [one for one in classes if not one.__subclasses__()]
    assert len(leaves) > 10
    for leaf in leaves:
        builtins = [base for base in leaf.__mro__ if base.__module__ == "builtins" and base not in (Exception, BaseException, object)]
        assert builtins, f"{leaf.__name__} is no builtin error"
