"""Write the Grafana dashboards, or check that the committed ones are current.

Usage: python scripts/gen_dashboards.py [--check]

The panels stand here, two lines each; Grafana's JSON is what they expand to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
WIDTH = 12
"""Of Grafana's 24 columns: two panels in a row."""
HEIGHT = 8
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
OF_BUFFER = 'buffer=~"$buffer"'


@dataclass(frozen=True)
class Panel:
    """One graph over time."""

    title: str
    description: str
    """What to read from it, shown when one points at the title."""
    queries: Sequence[tuple[str, str]]
    """PromQL and the legend of its lines."""
    unit: str = "short"
    """Of the axis, as Grafana names it."""


def quantiles(
    metric: str, matchers: str = "", by: str = "", *, is_whole: bool = False
) -> list[tuple[str, str]]:
    """Median and 99th percentile of a histogram over the last minute.

    Of whole numbers, what Prometheus draws between the bounds of a bucket is rounded up: a chunk
    that is used once lies between 0 and 1 and was not used 0.5 times.
    """
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    inner = f"sum by ({labels}) (rate({metric}_bucket{{{matchers}}}[1m]))"
    shown = "ceil(histogram_quantile({}, {}))" if is_whole else "histogram_quantile({}, {})"
    return [(shown.format(q, inner), f"p{q[2:]}{legend}") for q in ("0.50", "0.99")]


def rate_by(metric: str, label: str, matchers: str = "") -> list[tuple[str, str]]:
    """Growth per second of a counter, one line per value of a label."""
    return [(f"sum by ({label}) (rate({metric}{{{matchers}}}[1m]))", f"{{{{{label}}}}}")]


def mean_of(metric: str, by: str) -> list[tuple[str, str]]:
    """Mean of what a summary took in over the last minute."""
    total, count = (f"sum by ({by}) (rate({metric}_{part}[1m]))" for part in ("sum", "count"))
    return [(f"{total} / {count}", f"{{{{{by}}}}}")]


def gauges(*names: str, matchers: str = OF_BUFFER) -> list[tuple[str, str]]:
    """Gauges of a buffer, side by side."""
    return [(f"sum(breadbox_{name}{{{matchers}}})", name.replace("_", " ")) for name in names]


LEARNING_DATA = [
    Panel(
        "Episode return",
        "Mean sum of rewards of the episodes reported in the last minute, by task.",
        mean_of("breadbox_episode_return", "task"),
    ),
    Panel(
        "Model version",
        "Version that the learner has published. Flat means that it does not get on.",
        [(f"max by (buffer) (breadbox_model_version{{{OF_BUFFER}}})", "{{buffer}}")],
    ),
    Panel(
        "Fragments in, by outcome",
        "What became of fragments that workers appended. All but `admitted` was work for nothing.",
        rate_by("breadbox_fragments_total", "outcome", OF_BUFFER),
        "ops",
    ),
    Panel(
        "Payload bytes in and out",
        "Admitted from workers, and granted to learners; reuse makes out exceed in.",
        [
            (f"sum(rate(breadbox_admitted_bytes_total{{{OF_BUFFER}}}[1m]))", "in"),
            (f"sum(rate(breadbox_delivered_bytes_total{{{OF_BUFFER}}}[1m]))", "out"),
        ],
        "Bps",
    ),
    Panel(
        "Staleness at delivery",
        "Versions between the current model and the one that made the data. The limit is "
        "staleness_max.",
        quantiles("breadbox_staleness_at_delivery_versions", OF_BUFFER, is_whole=True),
    ),
    Panel(
        "Staleness at release",
        "The same when the learner released the data as used: at most this when trained on. "
        "staleness_max does not bound it: batches fetched ahead wait for updates.",
        quantiles("breadbox_staleness_at_release_versions", OF_BUFFER, is_whole=True),
    ),
    Panel(
        "Uses at eviction",
        "Deliveries of a chunk when it left. Below uses_max: the learner is slower than the "
        "workers, or the data goes stale first.",
        quantiles("breadbox_uses_at_eviction", OF_BUFFER, is_whole=True),
    ),
    Panel(
        "Chunks that left, by reason",
        "`used_up` is as it should be; `stale` and `capacity` are data that was made for nothing.",
        rate_by("breadbox_chunks_evicted_total", "reason", OF_BUFFER),
        "ops",
    ),
    Panel(
        "Groups delivered of those that ended, by tag and length",
        "Share by the number `tag` of their members and their length. A low one: groups that take "
        "long are dropped, and the learner is trained on the others.",
        [
            (
                f'sum by (tag, length) (breadbox_tagged_groups{{{OF_BUFFER},end="delivered"}})'
                f" / sum by (tag, length) (breadbox_tagged_groups{{{OF_BUFFER}}})",
                "{{tag}} {{length}}",
            )
        ],
        "percentunit",
    ),
    Panel(
        "Chunks held",
        "What fetches can draw from, against the limit at which the full policy decides.",
        gauges("chunks", "open_chunks", "capacity_chunks"),
    ),
    Panel(
        "Fetch wait",
        "Time from a learner's fetch to its grant.",
        quantiles("breadbox_fetch_wait_seconds", f'{OF_BUFFER},outcome="granted"'),
        "s",
    ),
    Panel(
        "Waiting fetches, by what they wait for",
        "Zero or briefly one is healthy; runbook: BreadboxLearnerStarved.",
        [
            (
                f"sum by (reason) (breadbox_waiters{{{OF_BUFFER}}})",
                "{{reason}}",
            )
        ],
    ),
    Panel(
        "Workers that take part",
        "Fragment sequences seen in the current session.",
        [(f"sum by (buffer) (breadbox_workers{{{OF_BUFFER}}})", "{{buffer}}")],
    ),
    Panel(
        "Fragments of open chunks given up, by reason",
        "Gaps come from workers that dropped data; `stale` from workers that are slower than the "
        "learner publishes.",
        rate_by("breadbox_fragments_discarded_total", "reason", OF_BUFFER),
        "ops",
    ),
]

SERVICE_HEALTH = [
    Panel(
        "Calls per second, by method",
        "Everything that was answered, refusals included.",
        rate_by("breadbox_rpcs_total", "method"),
        "reqps",
    ),
    Panel(
        "Calls that failed, by code",
        "INTERNAL is a bug of ours; RESOURCE_EXHAUSTED is back pressure; UNAVAILABLE a drain or "
        "a store that is away.",
        rate_by("breadbox_rpcs_total", "code", 'code!="OK"'),
        "reqps",
    ),
    Panel(
        "Call latency, 99th percentile",
        "FetchFragments and WatchModel block on purpose and are left out.",
        [
            (
                "histogram_quantile(0.99, sum by (le, method) (rate(breadbox_rpc_seconds_bucket"
                '{method!~"FetchFragments|WatchModel"}[1m])))',
                "{{method}}",
            )
        ],
        "s",
    ),
    Panel(
        "Store round trips",
        "Time from the server's side; appends wait for `confirm`.",
        quantiles("breadbox_store_seconds", by="operation"),
        "s",
    ),
    Panel(
        "Store errors",
        "Failed trips to the payload store.",
        rate_by("breadbox_store_errors_total", "operation"),
        "ops",
    ),
    Panel(
        "Store memory",
        "What the payload store holds, and its limit; at the limit producers are told to wait.",
        [
            ("breadbox_store_used_bytes", "used"),
            ("breadbox_store_limit_bytes > 0", "limit"),
            ("sum(breadbox_payload_bytes)", "payloads of all buffers"),
        ],
        "bytes",
    ),
    Panel(
        "Queues",
        "Fragments that wait for admission, payloads that wait for deletion.",
        [
            ("breadbox_pending_appends", "appends"),
            ("breadbox_pending_deletions", "deletions"),
        ],
    ),
    Panel(
        "Journal lag",
        "Age of the oldest decision that is not durable yet; replies wait for it.",
        [("breadbox_journal_lag_seconds", "lag")],
        "s",
    ),
    Panel(
        "Leases that ended, by how",
        "`expired` is a learner that died or forgot to renew; runbook: BreadboxLeasesExpire.",
        [("sum by (end) (rate(breadbox_leases_ended_total[1m]))", "{{end}}")],
        "ops",
    ),
    Panel(
        "Leases and waiting fetches",
        "Of all buffers.",
        [("sum(breadbox_leases)", "leases"), ("sum(breadbox_waiters)", "waiters")],
    ),
    Panel(
        "Clients, by role",
        "Peers that called within the last minute, by what they called.",
        [("breadbox_clients", "{{role}}"), ("breadbox_watchers", "watching the model")],
    ),
    Panel(
        "Server process",
        "CPU of one core, and resident memory in GiB.",
        [
            ('rate(process_cpu_seconds_total{job="breadbox"}[1m])', "cores"),
            ('process_resident_memory_bytes{job="breadbox"} / 2^30', "GiB resident"),
        ],
    ),
]


def panel_json(panel: Panel, number: int) -> dict[str, Any]:
    """Grafana's form of a panel; `number` counts from 0 and gives its place."""
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {
            "x": number % 2 * WIDTH,
            "y": number // 2 * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def dashboard_json(uid: str, title: str, panels: Sequence[Panel], *, by_buffer: bool) -> str:
    """Grafana's form of a dashboard."""
    buffer = {
        "name": "buffer",
        "label": "Buffer",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(breadbox_chunks, buffer)", "refId": "buffer"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
    content = {
        "uid": uid,
        "title": title,
        "tags": ["breadbox"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [buffer] if by_buffer else []},
        "panels": [panel_json(panel, number) for number, panel in enumerate(panels)],
    }
    return json.dumps(content, indent=2) + "\n"


def dashboards() -> dict[str, str]:
    """File name and content of every dashboard."""
    return {
        "learning-data.json": dashboard_json(
            "breadbox-learning-data", "Breadbox: learning data", LEARNING_DATA, by_buffer=True
        ),
        "service-health.json": dashboard_json(
            "breadbox-service-health", "Breadbox: service health", SERVICE_HEALTH, by_buffer=False
        ),
    }


def main() -> int:
    """Write the dashboards, or with --check return 1 and name those that are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = []
    for name, content in dashboards().items():
        path = TARGET / name
        if check:
            if not path.exists() or path.read_text() != content:
                stale.append(name)
        else:
            path.write_text(content)
    if stale:
        print(f"stale dashboards: {', '.join(stale)}; run python scripts/gen_dashboards.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
