"""The monitor ``opentelemetry``: spans over OTLP/HTTP, trajectory > turn > tool.

The span of a turn is from when it was queued until its last tool has answered; its attributes say
how long it waited for a seat and was generated. ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``_HEADERS`` and
``OTEL_TRACES_SAMPLER`` are read as the SDK's own pages say. Attributes ``gen_ai.*`` are those of
OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from libra_cli.core.records import Record, TrajectoryRecord, TurnRecord
from libra_cli.runtime.monitors.protocol import MonitoredRun

_Member: TypeAlias = tuple[int, int, int]
MOST_SPANS = 16_384
"""Most spans that wait to be sent; more are dropped, as the SDK does."""


class OpenTelemetry:
    """Exports a trace for each trajectory, with spans for its turns and tool calls."""

    packages = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    records = (TrajectoryRecord, TurnRecord)

    def __init__(self, *, endpoint: str | None = None, service: str = "libra") -> None:
        """``endpoint`` is a collector's ``http://HOST:4318``; null: that of the environment."""
        self._endpoint = endpoint
        self._service = service
        self._open: dict[_Member, Any] = {}

    def start(self, run: MonitoredRun) -> None:
        """Make the exporter; it connects when there is something to send."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        _tell_once(run.note)
        path = f"{self._endpoint.rstrip('/')}/v1/traces" if self._endpoint else None
        resource = Resource.create({"service.name": self._service, "libra.run": run.id})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=path)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MOST_SPANS))
        self._tracer = self._provider.get_tracer("libra")
        self._under = trace.set_span_in_context
        self._error = trace.StatusCode.ERROR

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ignore a step: its spans come with its records."""

    def saw(self, record: Record) -> None:
        """Begin or end the span of a trajectory, or add those of a turn and its tool calls."""
        if isinstance(record, TurnRecord):
            self._turn(record)
        elif isinstance(record, TrajectoryRecord):
            self._trajectory(record)

    def _trajectory(self, row: TrajectoryRecord) -> None:
        who = (row.group_id, row.member, row.attempt)
        if row.ended_at is None:
            self._open[who] = self._tracer.start_span("trajectory", start_time=_ns(row.started_at))
            return
        span = self._open.pop(who, None)
        if span is None:  # it began before this process did
            return
        span.set_attributes(
            {
                "libra.group": row.group_id,
                "libra.member": row.member,
                "libra.attempt": row.attempt,
                "libra.state": row.state,
                "libra.reward": row.reward if row.reward is not None else float("nan"),
                "libra.turns": row.turns,
                "gen_ai.usage.output_tokens": row.generated_tokens,
                "libra.context_tokens": row.context_tokens,
            }
        )
        if row.state == "failed":
            span.set_status(self._error, row.detail)
        span.end(end_time=_ns(row.ended_at))

    def _turn(self, row: TurnRecord) -> None:
        parent = self._open.get((row.group_id, row.member, row.attempt))
        if parent is None:
            return
        span = self._tracer.start_span(
            "turn",
            context=self._under(parent),
            start_time=_ns(row.queued_at),
            attributes={
                "libra.turn": row.turn,
                "libra.server": row.slot,
                "libra.moved_from": row.moved_from,
                "libra.queued_s": row.started_at - row.queued_at,
                "libra.generated_s": row.ended_at - row.started_at,
                "gen_ai.usage.input_tokens": row.prompt_tokens,
                "gen_ai.usage.output_tokens": row.generated_tokens,
                "gen_ai.response.finish_reasons": [row.finish_reason],
            },
        )
        at = row.ended_at
        for call in row.tools:
            inner = self._tracer.start_span(
                "tool",
                context=self._under(span),
                start_time=_ns(at),
                attributes={
                    "gen_ai.tool.name": call.tool,
                    "libra.outcome": call.outcome,
                    "libra.characters": call.characters,
                },
            )
            if call.outcome != "ok":
                inner.set_status(self._error, call.outcome)
            at += call.latency_s  # the calls of a turn run one after the other
            inner.end(end_time=_ns(at))
        span.end(end_time=_ns(at))

    def finish(self, state: str) -> None:
        """Send the rest; trajectories that never ended are ended here."""
        for span in self._open.values():
            span.end()
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class _FirstWords(logging.Handler):
    """Tells the first complaint of the SDK, which would fill the terminal with them."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note: Callable[[str], None] | None = note

    def emit(self, record: logging.LogRecord) -> None:
        """Note the SDK's first complaint, and no later one."""
        note, self._note = self._note, None
        if note is not None:
            note(f"monitor opentelemetry: {record.getMessage()[:300]}")


def _tell_once(note: Callable[[str], None]) -> None:
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.handlers = [_FirstWords(note)]
