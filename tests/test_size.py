"""How small it is. Small is a feature, so it is tested. A fork that means to grow deletes this
file, and keeps test_shape.py."""

import ast

import pytest
from conftest import ROOT

from tools.report import CARD, ENGINE, code_lines, code_nodes


def test_counts_code_only():
    """Count the lines and nodes of a small source. Catches: a comment that costs, or a statement
    that is free."""
    source = (
        '"""Doc\n\nstring."""\n\n# comment\nx = [  # trailing\n    1,\n]\n\n\n'
        'async def f():\n    """Doc."""\n    return """a\nb"""\n'
    )
    assert code_lines(source) == 3 + 3  # the list; a head, and a string of two lines
    assert code_nodes(source) == 4 + 3  # =, x, the list, 1; def, return, the string


TOP = [file.stem for file in ROOT.glob("*.py")]
AROUND = [str(file.relative_to(ROOT).with_suffix("")) for file in ROOT.glob("around/**/*.py")]


# These go down and never up: who mends a fault or adds a feature finds what can go. Nodes bound
# what there is to understand, and nodes per line bound folding.
@pytest.mark.parametrize(
    ("names", "most_lines", "most_nodes"),
    [(ENGINE, 1000, 6300), (CARD, 1250, 7400), (TOP, 1540, 9540), (TOP + AROUND, 4500, 26500)],
    ids=["the six files", "the card", "the root", "everything"],
)
def test_budget(names, most_lines, most_nodes):
    """Count the lines and nodes of the code, as report.py does, and compare with their bounds.
    Catches: a feature added without weighing what it costs, or folded into few lines that nobody
    can read."""
    sources = {name: (ROOT / f"{name}.py").read_text() for name in names}
    sizes = {name: (code_lines(text), code_nodes(text)) for name, text in sources.items()}
    lines, nodes = map(sum, zip(*sizes.values()))
    found = f"{lines} lines, {nodes} nodes: {sizes}"
    way_out = "find what can go for what has come; a fork raises its bounds in this table"
    assert lines <= most_lines and nodes <= most_nodes, f"{found}; {way_out}"
    assert nodes / lines <= 6.4, f"{found}; unfold some lines"


def test_tools_budget():
    """Count the lines of the tools. Catches: tools beside the engine that grow larger than what
    they measure."""
    sizes = {file.name: code_lines(file.read_text()) for file in ROOT.glob("tools/*.py")}
    assert sum(sizes.values()) <= 1800, sizes


def test_only_tables_keep_a_layout_of_their_own():
    """Look for `fmt:` comments outside of tables. A table of data is a statement outside all
    functions that assigns a dict, list, set or tuple, or what is made of one. Catches: code folded
    past the formatter."""
    displays = (ast.Dict, ast.List, ast.Set, ast.Tuple, ast.Call, ast.BinOp)
    for folder in (ROOT.glob("*.py"), ROOT.glob("around/**/*.py"), ROOT.glob("tools/*.py")):
        for file in folder:
            source = file.read_text()
            tables = {
                node.end_lineno
                for node in ast.parse(source).body
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, displays)
            }
            for number, line in enumerate(source.splitlines(), 1):
                skips = "# fmt: " in line and '"# fmt: ' not in line
                assert not skips or number in tables, f"{file.name}:{number}"
