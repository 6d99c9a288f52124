"""The monitor ``prometheus``: ``/metrics`` on the controller's loopback, for Prometheus to scrape.

Every number of the newest step as ``libra_reward_mean{run="..."}``, and every number of every
rollout server as it was read last, with a label ``slot``. Counters that change from second to
second belong here and not in W&B.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any

from libra_cli.core.metric_names import is_number
from libra_cli.core.records import Record, SampleRecord
from libra_cli.runtime.monitors.between_steps import server_metrics
from libra_cli.runtime.monitors.protocol import MonitoredRun

_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")


class Prometheus:
    """Serves the newest values over HTTP to whoever scrapes."""

    packages = ("prometheus_client",)
    records = (SampleRecord,)

    def __init__(self, *, port: int = 9464, address: str = "127.0.0.1") -> None:
        """Port 0 is any that is free. Whoever reaches ``address`` can read; nobody can write."""
        self._address = (address, port)
        self._lock = Lock()
        self._steps: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}
        self._servers: dict[str, dict[str, float | None]] = {}
        self._server: Any = None

    def start(self, run: MonitoredRun) -> None:
        """Listen at the address and port of the recipe, and note the URL."""
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import GaugeMetricFamily

        self._gauge = GaugeMetricFamily
        self._run = run.id
        registry = CollectorRegistry()
        registry.register(self)
        address, port = self._address
        self._server, _ = start_http_server(port, address, registry)
        run.note(f"Prometheus: http://{address}:{self._server.server_port}/metrics")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep a step's metrics, but for the servers', which ``saw`` keeps one by one."""
        told = {key: value for key, value in metrics.items() if not key.startswith("server/")}
        with self._lock:
            self._steps = {"step": step, **told}

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._evaluated |= metrics

    def saw(self, record: Record) -> None:
        """Keep a server's reading; records of other kinds are not for this monitor."""
        if isinstance(record, SampleRecord):
            with self._lock:
                self._servers[record.slot] = server_metrics(record)

    def collect(self) -> Iterator[Any]:
        """Yield a gauge for each metric; prometheus_client calls this at every scrape."""
        with self._lock:
            steps, servers = self._steps | self._evaluated, dict(self._servers)
        for key, value in steps.items():
            gauge = self._gauge(name_of(key), key, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge
        for key in dict.fromkeys(key for metrics in servers.values() for key in metrics):
            gauge = self._gauge(name_of(key), key, labels=["run", "slot"])
            for slot, metrics in servers.items():
                if is_number(number := metrics.get(key)):
                    gauge.add_metric([self._run, slot], number)
            yield gauge

    def finish(self, state: str) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def name_of(key: str) -> str:
    """Return the metric's name in Prometheus: ``reward/mean`` is ``libra_reward_mean``."""
    return "libra_" + _NO_NAME.sub("_", key)
