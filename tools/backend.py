"""setuptools, but for editable installs only: such module names do not belong in site-packages."""

from typing import Any

from setuptools.build_meta import *  # noqa: F403


def build_wheel(*_: Any) -> str:
    raise SystemExit("kilolm is a folder to clone and run in: use pip install -e . (mind the -e)")


build_sdist = prepare_metadata_for_build_wheel = build_wheel
