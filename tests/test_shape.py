"""What may import what: the root is the engine, and around/ has wings, each with one door."""

import ast
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

WINGS = ("folder", "fast", "api", "start")
GROUND = ("settings", "machine", "program")  # single files, which import nothing from the root
ROOMS = [*ROOT.glob("*.py"), *(ROOT / "around").rglob("*.py")]


def name_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(file): file for file in ROOMS}


def imported(file):
    """(module, is it imported where the file is imported) of all of the project that a file imports."""
    tree = ast.parse(file.read_text())
    package = name_of(file) if file.name == "__init__.py" else name_of(file).rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [package * bool(node.level), node.module]))
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add((whole if whole in NAMES else base, node in tree.body))
        elif isinstance(node, ast.Import):
            found |= {(alias.name, node in tree.body) for alias in node.names}
    return {(name, early) for name, early in found if name in NAMES}


def home(name):
    """A file of the root or of the ground floor is a room of its own, a wing is one."""
    top, _, rest = name.partition(".")
    return f"around.{rest.partition('.')[0]}" if top == "around" and rest else name


@pytest.mark.parametrize("file", ROOMS, ids=name_of)
def test_doors(file):
    """A room that reaches past another wing's door, into one of its files."""
    for name, _ in imported(file):
        inside = name.count(".") > 1 and home(name).rpartition(".")[2] in WINGS
        assert not inside or home(name) == home(name_of(file)), f"{name_of(file)} imports {name}"


def test_arrows():
    """Two rooms that need each other, so that neither can be read, or replaced, alone."""
    arrows = {}
    for file in ROOMS:
        own = home(name_of(file))
        arrows.setdefault(own, set()).update(
            home(n) for n, early in imported(file) if early and home(n) != own
        )
    arrows.pop("around", None)
    for needs in arrows.values():
        needs.discard("around")
    print([*TopologicalSorter(arrows).static_order()])


def test_the_ground_floor_knows_nothing():
    for name in GROUND:
        needs = {home(n) for n, _ in imported(ROOT / "around" / f"{name}.py")}
        assert needs <= {f"around.{each}" for each in GROUND} | {"around"}, (name, needs)


def test_model_needs_torch_alone():
    assert not imported(ROOT / "model.py")
