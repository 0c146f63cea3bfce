"""Dashboards and alerts ask for what the server really exports, and say what to do about it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from breadbox_server.metrics.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
METRIC = re.compile(r"\b(?:breadbox|process|python)_[a-z0-9_]+\b")
SUFFIXES = {
    "counter": ("_total", "_created"),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
    "gauge": ("",),
}


def exported_names() -> set[str]:
    """Names of all series that a server can export."""
    registry = CollectorRegistry()
    Metrics(registry)
    return {
        family.name + suffix for family in registry.collect() for suffix in SUFFIXES[family.type]
    }


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and the PromQL, of every query that is shipped."""
    for rule in rules():
        yield f"alerts.yml: {rule.get('alert') or rule['record']}", rule["expr"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]


def test_every_metric_in_dashboards_and_alerts_is_exported() -> None:
    known = exported_names()
    unknown = {
        f"{where}: {name}"
        for where, expression in expressions()
        for name in METRIC.findall(expression)
        if name not in known
    }

    assert set() == unknown


def test_every_counter_of_loss_or_refusal_is_on_a_dashboard_or_in_an_alert() -> None:
    shown = {name for _, expression in expressions() for name in METRIC.findall(expression)}
    losses = {
        "breadbox_fragments_discarded_total",
        "breadbox_payloads_missing_total",
        "breadbox_chunks_evicted_total",
        "breadbox_leases_ended_total",
        "breadbox_store_errors_total",
        "breadbox_fragments_total",
        "breadbox_rpcs_total",
    }

    assert set() == losses - shown


def test_there_are_two_dashboards_and_they_are_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gen_dashboards.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert ["learning-data.json", "service-health.json"] == [path.name for path in DASHBOARDS]
    assert (0, "") == (done.returncode, done.stdout)


def test_no_two_panels_of_a_dashboard_overlap() -> None:
    for path in DASHBOARDS:
        places = [panel["gridPos"] for panel in json.loads(path.read_text())["panels"]]
        corners = {(place["x"], place["y"]) for place in places}
        assert len(places) == len(corners)


def test_every_alert_has_a_paragraph_in_the_runbook() -> None:
    runbook = (ROOT / "docs" / "operate.md").read_text()
    headings = set(re.findall(r"^#+ (\w+)$", runbook, re.MULTILINE))

    for rule in alert_rules():
        assert rule["alert"] in headings
        assert f"docs/operate.md#{rule['alert'].lower()}" == rule["annotations"]["runbook"]
    assert {rule["alert"] for rule in alert_rules()} == {
        heading for heading in headings if heading.startswith("Breadbox")
    }


@pytest.mark.parametrize(
    "arguments",
    [("config", "prometheus.yml"), ("rules", "alerts.yml")],
    ids=["configuration", "alert rules"],
)
def test_promtool_accepts_the(arguments: tuple[str, str]) -> None:
    kind, name = arguments
    run_promtool("check", kind, str(PROMETHEUS / name))


WAITED = "breadbox_fetch_wait_seconds_sum"
WAITING = "breadbox_waiters"


@pytest.mark.parametrize(
    ("series", "recorded"),
    [
        # Half of each 15 s, and somebody waits at every other scrape.
        ({WAITED + '{buffer="default",outcome="granted"}': "0+7.5x20",
          WAITING + '{buffer="default",reason="chunks"}': "0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0"},
         0.5),
        # One fetch that waits all the time: nothing is added to the sum before it ends.
        ({WAITED + '{buffer="default",outcome="granted"}': "100+0x20",
          WAITING + '{buffer="default",reason="chunks"}': "1+0x20"},
         1.0),
        # The same by the first fetch that there ever was.
        ({WAITING + '{buffer="default",reason="chunks"}': "1+0x20"}, 1.0),
        # Two learners, and what one of them waits for changes.
        ({WAITED + '{buffer="default",outcome="granted"}': "0+30x20",
          WAITING + '{buffer="default",reason="chunks"}': "2 0 2 0 2 0 2 0 2 0 2 0 2 0 2 0",
          WAITING + '{buffer="default",reason="turn"}': "0 2 0 2 0 2 0 2 0 2 0 2 0 2 0 2"},
         2.0),
        # Nobody waits.
        ({WAITED + '{buffer="default",outcome="granted"}': "7+0x20",
          WAITING + '{buffer="default",reason="chunks"}': "0+0x20"},
         0.0),
    ],
    ids=["now and then", "all the time", "from the start", "two learners", "never"],
)  # fmt: skip
def test_the_ratio_that_workers_are_scaled_by_counts_fetches_that_still_wait(
    series: dict[str, str], recorded: float, tmp_path: Path
) -> None:
    (rule,) = [rule for rule in rules() if "record" in rule]
    shown = {"labels": f'{rule["record"]}{{buffer="default"}}', "value": recorded}
    wanted = [{"expr": rule["record"], "eval_time": "225s", "exp_samples": [shown]}]
    check_rules(tmp_path, series, wanted)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("breadbox_uses_at_eviction", 1),
        ("breadbox_uses_at_eviction", 3),
        ("breadbox_staleness_at_delivery_versions", 0),
        ("breadbox_staleness_at_delivery_versions", 2),
        ("breadbox_staleness_at_release_versions", 3),
    ],
)
def test_whole_numbers_are_shown_as_whole_numbers(metric: str, value: int, tmp_path: Path) -> None:
    """Every chunk was used once, and the panel said 0.5."""
    shown = [text.replace("$buffer", ".*") for _, text in expressions() if f"{metric}_b" in text]
    assert 2 == len(shown)
    bounds = {"0.0": 0, "1.0": 1, "2.0": 2, "3.0": 3, "5.0": 5, "+Inf": 9}
    series = {
        f'{metric}_bucket{{buffer="default",le="{text}"}}': (
            "0+10x20" if value <= bound else "0+0x20"
        )
        for text, bound in bounds.items()
    }
    wanted = [
        {"expr": text, "eval_time": "4m", "exp_samples": [{"labels": "{}", "value": value}]}
        for text in shown
    ]
    check_rules(tmp_path, series, wanted)


@pytest.mark.parametrize(
    ("leads", "away", "fires"),
    [
        ({"a": None}, {"a"}, {"BreadboxDown"}),
        ({"a": 1, "b": None}, {"b"}, {"BreadboxServerAway"}),
        ({"a": None, "b": 0}, {"a"}, {"BreadboxDown", "BreadboxNobodyLeads"}),
        ({"a": 0, "b": 0}, set(), {"BreadboxNobodyLeads"}),
        ({"a": 1, "b": 0}, set(), set()),
    ],
    ids=["the only one", "one of two", "the leader", "nobody begins", "all is well"],
)
def test_who_is_woken_depends_on_whether_anybody_leads(
    leads: dict[str, int | None], away: set[str], fires: set[str], tmp_path: Path
) -> None:
    series = {}
    for name, value in leads.items():
        where = f'{{job="breadbox",instance="{name}"}}'
        series["up" + where] = f"{int(name not in away)}+0x20"
        if value is not None:
            series["breadbox_leads" + where] = f"{value}+0x20"
    # Another service, which is well, changes nothing.
    series['up{job="breadbox-other",instance="c"}'] = "1+0x20"
    series['breadbox_leads{job="breadbox-other",instance="c"}'] = "1+0x20"
    alerts = ("BreadboxDown", "BreadboxNobodyLeads", "BreadboxServerAway")
    wanted = [
        {
            "expr": f'count(ALERTS{{alertstate="firing",alertname="{alert}"}})',
            "eval_time": "4m",
            "exp_samples": [{"labels": "{}", "value": 1}] if alert in fires else [],
        }
        for alert in alerts
    ]
    check_rules(tmp_path, series, wanted)


@pytest.mark.parametrize("is_refused", [True, False])
def test_somebody_is_woken_when_redis_refuses_to_write(is_refused: bool, tmp_path: Path) -> None:
    series = {
        'breadbox_store_refusals_total{place="journal"}': f"0+{60 * is_refused}x20",
        'breadbox_store_refusals_total{place="payload_store"}': "3+0x20",
    }
    wanted = {
        "expr": 'count by (place) (ALERTS{alertstate="firing",alertname="BreadboxStoreRefuses"})',
        "eval_time": "4m",
        "exp_samples": [{"labels": '{place="journal"}', "value": 1}] if is_refused else [],
    }
    check_rules(tmp_path, series, [wanted])


def test_eight_slow_environments_beside_a_thousand_fast_ones_raise_an_alert(tmp_path: Path) -> None:
    """Of all steps, 0.2 % were lost, and the alerts looked at the share of all."""
    (rule,) = [each for each in alert_rules() if each["alert"] == "BreadboxWorkersLeftOut"]
    name = "breadbox_workers_left_out"
    series = {f'{name}{{buffer="default",worker="slow"}}': "8+0x20"}
    labels = f'{name}{{buffer="default",worker="slow"}}'
    wanted = [
        {"expr": rule["expr"], "eval_time": "3m", "exp_samples": [{"labels": labels, "value": 8}]}
    ]
    check_rules(tmp_path, series, wanted)


def check_rules(folder: Path, series: dict[str, str], wanted: list[dict[str, Any]]) -> None:
    """See that expressions come to what is wanted over series of a value every 15 s."""
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    case = {
        "rule_files": [str(PROMETHEUS / "alerts.yml")],
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": inputs, "promql_expr_test": wanted}],
    }
    path = folder / "case.yml"
    path.write_text(yaml.safe_dump(case))
    run_promtool("test", "rules", str(path))


def run_promtool(*arguments: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus brings it)")
    done = subprocess.run(
        [promtool, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert 0 == done.returncode, done.stdout + done.stderr
