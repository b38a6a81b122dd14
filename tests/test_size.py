"""The line budget, and the doors between the files: small is a feature, so it is tested."""

import ast
from graphlib import TopologicalSorter

from conftest import ROOT

from tools.report import CORE, MODULES, code_lines

CORE_CAP, CAP = 1350, 2400  # lines of code; see what the README counts


def test_counts_code_only():
    source = (
        '"""Doc\n\nstring."""\n\n# comment\nx = [  # trailing\n    1,\n]\n\n\ny = """a\n\nb"""\n'
    )
    assert code_lines(source) == 5  # three of the list, two non-blank ones of y


def test_line_budget():
    assert {file.stem for file in ROOT.glob("*.py")} == {*MODULES}
    counts = {name: code_lines((ROOT / f"{name}.py").read_text()) for name in MODULES}
    assert sum(counts[name] for name in CORE) <= CORE_CAP, counts
    assert sum(counts.values()) <= CAP, counts


def test_no_line_is_longer_than_100():
    for file in (*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            assert len(line) <= 100, f"{file.name}:{number}"


def imports(path):
    """The names of what a file imports at its top, and of what it imports further down."""
    tree = ast.parse((ROOT / path).read_text())
    found = {True: set(), False: set()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found[node in tree.body] |= {*([node.module] if "module" in node._fields else names)}
    return found[True], found[False]


def test_doors():
    """A tool that the engine cannot run without; a scheduler that knows the command line; two files
    that import each other, and so cannot be read one after the other."""
    doors = {name: imports(f"{name}.py") for name in MODULES}
    every = {name: top | further for name, (top, further) in doors.items()}
    assert not any(door.startswith("tools") for top, _ in doors.values() for door in top)
    to_tools = [(n, d) for n, doors in every.items() for d in doors if d.startswith("tools")]
    assert to_tools == [("quantize", "tools.formats")]
    assert not every["scheduler"] & {"generate", "server"}
    for name in CORE[:-1]:
        assert name == "generate" or every[name].isdisjoint(("scheduler", *MODULES[len(CORE) :]))
    TopologicalSorter({name: found & {*MODULES} for name, found in every.items()}).prepare()
    assert "quantize" not in set.union(*imports("tools/formats.py"))
