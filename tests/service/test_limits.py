"""The table of limits says what the server does, counts and lets itself be told."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from breadbox.cli.main import load_command
from breadbox.model.sizes import parse_size_bytes
from breadbox_server.limits import LIMITS, Limit
from breadbox_server.metrics.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]


def by_name(limit: Limit) -> str:
    return limit.name


def exported_names() -> set[str]:
    registry = CollectorRegistry()
    Metrics(registry)
    return {
        family.name + suffix
        for family in registry.collect()
        for suffix in ("", "_total", "_count", "_sum")
        if family.type != "counter" or suffix == "_total"
    }


def test_no_two_limits_have_one_name() -> None:
    names = [limit.name for limit in LIMITS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("limit", [each for each in LIMITS if each.metric], ids=by_name)
def test_the_metric_of_a_limit_is_exported(limit: Limit) -> None:
    assert limit.metric in exported_names()


@pytest.mark.parametrize("limit", [each for each in LIMITS if each.option], ids=by_name)
def test_the_option_of_a_limit_has_its_value_as_the_default(limit: Limit) -> None:
    options = {flag: option for option in load_command("serve").params for flag in option.opts}
    assert limit.value == parse_size_bytes(str(options[limit.option].default))


def test_security_md_holds_the_table_of_now() -> None:
    script = ROOT / "scripts" / "gen_limits.py"
    assert 0 == subprocess.run([sys.executable, str(script), "--check"], check=False).returncode


def test_the_script_writes_every_limit_between_its_marks() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "gen_limits.py"))
    text = script["with_table"](f"before\n{script['BEGIN']}old\n{script['END']}after\n")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert [] == [limit.name for limit in LIMITS if f"| {limit.name} |" not in text]
