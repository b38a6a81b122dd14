"""The README: every command of its shell blocks runs, and its tables match their records."""

import re
import shlex
import signal
import subprocess
import sys
from functools import cache

import pytest
from conftest import ROOT, SHAKESPEARE

import generate
from around.start import parse_args
from tools import report

README = (ROOT / "README.md").read_text()
FOLDERS = (".", "docs", "benchmarks", "checkpoints", "course", "course/exercises", "course/zh")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))


def shell_lines(text):
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


LINES = shell_lines(README)
COMMANDS = [line for line in LINES if line.startswith(("python ", "torchrun "))]
for name in ("quantisation", "machines"):
    COMMANDS += shell_lines((ROOT / "docs" / f"{name}.md").read_text())


def test_commands_are_understood(capfd):
    """Parse each command of the README and of docs/, and compare the text of the first one with
    what is shown. Catches: an option that is gone, or a file that has moved (the nightly tests also
    run the commands); a text of another command, or of an older sampler."""
    for command in [*COMMANDS, *shell_lines((ROOT / "docs" / "gpu.md").read_text())]:
        launcher, *words = shlex.split(command)
        assert launcher in ("python", "torchrun"), command
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        assert (ROOT / words[at]).is_file(), command
        if words[at] == "generate.py":
            parse_args(words[at + 1 :])
    assert generate.main(["--seed", "1", "--device", "cpu"]) == 0
    shown = README.partition("```\nsampling settings")[2].partition("\n...")[0]
    told, _, text = shown.partition("\n")
    out, err = capfd.readouterr()
    assert text and out.startswith(text + "\n") and err.startswith(f"sampling settings{told}\n")


def succeeds(words, **options):
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300, **options}
    run = subprocess.run(words, **options)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
    return run.stdout.strip()


# Those of the first page that need no download, and then all.
FIRST = [*[line for line in COMMANDS if line in LINES and "path/to" not in line], "the example"]
RUN = [pytest.param(line, marks=pytest.mark.slow) for line in FIRST]
RUN += [pytest.param(line, marks=pytest.mark.nightly) for line in COMMANDS if line not in FIRST]


@pytest.mark.parametrize("command", RUN)
def test_command_runs(command, tmp_path):
    """Run a command as it stands, with the bundled model in place of the reader's. Catches: a
    command that does not work."""
    command = command.replace("path/to/text.txt", str(ROOT / "course" / "README.md"))
    command = re.sub(r"path/to/new-\S+", str(tmp_path / "new"), command)
    words = shlex.split(re.sub(r"path/to/\S+", str(SHAKESPEARE), command), comments=True)
    if words[0] == "the":
        words = ["python", "-c", *re.findall(r"```python\n(.*?)```", README, re.DOTALL)]
    launchers = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    words = [sys.executable, *launchers[words[0]], *words[1:]]
    if "server.py" not in words:
        assert succeeds(words, input="Who goes there?\n") or (tmp_path / "new").is_dir()
        return
    words += ["--port", "0"]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any("serving" in line for line in process.stderr)
        finally:  # as a user would end it
            process.send_signal(signal.SIGINT)
            process.stderr.read()
            assert process.wait(timeout=120) == 0


def test_generated_pages_are_up_to_date(monkeypatch):
    """Compare each generated part of the pages with what `python tools/bench.py report` would
    write. Catches: a number typed by hand; a table that stays when its record is gone; old counts
    of lines; a paper left out."""
    for name in ("code_lines", "code_nodes"):  # of each file, which many sums ask for
        monkeypatch.setattr(report, name, cache(getattr(report, name)))
    for name, parts in report.PARTS.items():
        text = (ROOT / name).read_text()
        assert text == report.page(name), name
        filled = len(parts) + len([*(ROOT / name).parent.glob("*.json")])
        assert text.count("\n<!-- /") == filled, f"{name} has a part that nothing fills"
    table = (ROOT / "docs" / "files.md").read_text()
    for file in (file for files in report.rooms().values() for file in files):
        for paper in re.findall(r"arXiv:(\d{4}\.\d{5})", file.read_text().split('"""')[1]):
            assert f"abs/{paper})" in table, f"{file}: {paper}"


def test_the_first_page_stops():
    """Count the words of README.md, docs/ and benchmarks/, and compare the translated README's code
    and figures. Catches: pages that grow until nobody reads them; a translation with other code or
    figures."""
    lines = README.splitlines()
    assert len(lines) <= 110 and len(README.split()) <= 1000 and max(map(len, lines)) <= 120
    for name, most in (("docs", 5500), ("benchmarks", 4700)):
        words = sum(len(page.read_text().split()) for page in (ROOT / name).glob("*.md"))
        assert words <= most, name

    def shared(page):
        code = re.sub(r"(?<=\S) {3,}\S.*", "", "".join(page.split("```")[1::2]))  # no remarks
        return code, sorted(re.findall(r"^\|.*|\d[\d,.]+\d", page, re.MULTILINE))

    assert shared((ROOT / "docs" / "README.zh-CN.md").read_text()) == shared(README)


def test_links_lead_somewhere():
    """Follow each link of the pages, and look for each file that they name. Catches: a page or a
    heading that has another name now; a file that has moved."""
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(((?!http)[^)]+)\)", text):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page}: {link}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target.read_text()), f"{page}: {link}"
        folders = "around|tools|tests|docs|deploy|course|checkpoints"
        for file in re.findall(rf"`((?:{folders})/[\w/.-]+\.\w+)`", text):
            assert (ROOT / file).exists(), f"{page}: {file}"
        for name in re.findall(r"`(\w+\.py)`", text) if "exercises" not in str(page) else []:
            assert [*ROOT.rglob(name)], f"{page}: {name}"


def anchors(text):
    """Return the anchors that GitHub gives a page's headings: `## What it does` has
    what-it-does."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    found = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
    return found | {*re.findall(r'<a id="([\w-]+)">', text)}
