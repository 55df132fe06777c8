"""A cluster that a real Prometheus watches, and its counts as last scraped: where tests of the exporter stand."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support import prometheus, served_process
from tests.support.waiting import wait_until

MODEL = "tiny"
SETTLE_S = 120.0
# Gauges that are 0 when nothing runs.
ZERO_AT_REST = (
    "espalier_gateway_requests_in_flight",
    "espalier_num_requests_running",
    "espalier_num_requests_waiting",
    "espalier_kv_cache_usage_perc",
    "espalier_router_outstanding_tokens",
    "espalier_audit_pending",
)

Key = tuple[str, frozenset[tuple[str, str]]]


def key(name: str, **labels: str) -> Key:
    return name, frozenset(labels.items())


@dataclass(frozen=True)
class Stand:
    """The cluster, its Prometheus, and the file of its API keys."""

    served: served_process.Served
    watching: prometheus.Prometheus
    keys: Path

    def counts(self) -> dict[Key, float]:
        """Counters and histograms as last scraped, replicas added up. Scrapes themselves are not counted."""
        found: Counter[Key] = Counter()
        for series in self.watching.now('{__name__=~"espalier_.+_(total|count|sum|bucket)", route!="/metrics"}'):
            labels = {
                name: value for name, value in series.labels.items() if name not in ("job", "instance", "replica")
            }
            if labels.get("model") == MODEL:
                del labels["model"]
            found[key(labels.pop("__name__"), **labels)] += series.points[0][1]
        return found

    def total(self, expr: str) -> float:
        return sum(value for series in self.watching.now(expr) for value in series.finite)

    def at_rest(self) -> bool:
        return not any(self.total(name) for name in ZERO_AT_REST)

    def settle(self) -> dict[Key, float]:
        """The counts once nothing runs, and two scrapes and reports later nothing has changed any more."""
        wait_until(self.at_rest, "nothing runs", SETTLE_S)
        while True:
            before = self.counts()
            self.wait_for_scrapes(3)
            if self.at_rest() and self.counts() == before:
                return before

    async def audited(self) -> None:
        """Returns when all replies so far have been run again."""

        def done() -> bool:
            return 'espalier_audit_pending{model="tiny"} 0.0' in httpx.get(f"{self.served.http_url}/metrics").text

        await asyncio.to_thread(wait_until, done, "audits are done", SETTLE_S)

    def wait_for_scrapes(self, number: int) -> None:
        scrapes = "count_over_time(up[1h])"
        enough = self.total(scrapes) + number
        wait_until(lambda: self.total(scrapes) >= enough, "metrics are scraped", SETTLE_S)


def moved(before: dict[Key, float], after: dict[Key, float]) -> dict[Key, float]:
    """What has changed, but for measured times and for the buckets, which their counts vouch for."""
    times = ("_seconds_sum", "_bucket")
    changes = {what: value - before.get(what, 0.0) for what, value in after.items() if not what[0].endswith(times)}
    return {what: change for what, change in changes.items() if change}
