"""A target of the Makefile that continuous tests never run is broken one day, and nobody knows."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def smoke() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smoke", ROOT / "scripts" / "smoke.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", text, re.MULTILINE))


def run_by_continuous_tests() -> set[str]:
    lines = (ROOT / ".ci" / "run").read_text().replace("\\\n", " ").splitlines()
    commands = [line for line in lines if re.match(r"((again|aside) )?make ", line)]
    words = {word for line in commands for word in shlex.split(line) if "=" not in word}
    return words - {"again", "aside", "make"}


def test_continuous_tests_run_every_target_or_say_why_not(smoke: ModuleType) -> None:
    named = {words[0] for words in smoke.SMALLEST} | set(smoke.NOT_RUN)
    assert targets() == named | run_by_continuous_tests()


def test_a_target_is_either_run_or_not(smoke: ModuleType) -> None:
    run = {words[0] for words in smoke.SMALLEST} | run_by_continuous_tests()
    assert "smoke" in run
    assert set() == run & set(smoke.NOT_RUN)


def test_every_target_is_phony_since_no_file_is_made_of_its_name() -> None:
    (listed,) = re.findall(r"^\.PHONY:((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M)
    assert targets() == set(listed.replace("\\\n", " ").split())
