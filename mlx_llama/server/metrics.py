"""A server's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Counters of requests and tokens, in a registry per server: several fit in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "mlx_llama_requests",
            "requests to the model by outcome",
            ["outcome"],
            registry=self.registry,
        )
        self.http = Counter(
            "mlx_llama_http_responses", "responses by status", ["status"], registry=self.registry
        )
        self.prompt_tokens = Counter(
            "mlx_llama_prompt_tokens", "tokens of prompts", registry=self.registry
        )
        self.reused_tokens = Counter(
            "mlx_llama_prompt_tokens_reused",
            "tokens of prompts that were in the cache",
            registry=self.registry,
        )
        self.prefix_hits = Counter(
            "mlx_llama_prefix_hits",
            "requests whose prompt began in the cache",
            registry=self.registry,
        )
        self.generated_tokens = Counter(
            "mlx_llama_generated_tokens", "tokens generated", registry=self.registry
        )
        self.first_token = Histogram(
            "mlx_llama_first_token_seconds",
            "from a request to its first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.between_tokens = Histogram(
            "mlx_llama_between_tokens_seconds",
            "from a token to the next",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def observe_tokens(self, count: int, seconds: float, is_first: bool) -> None:
        """Count new tokens of an answer.

        seconds: since the previous tokens or, for the first ones, since the request.
        """
        if not count:
            return
        self.generated_tokens.inc(count)
        if is_first:
            self.first_token.observe(seconds)
        else:
            for _ in range(count):
                self.between_tokens.observe(seconds / count)

    def watch(self, desk: Any) -> None:
        """Report the state of a desk and its scheduler at each scrape."""
        self.registry.register(_Scrape(desk))


class _Scrape:
    def __init__(self, desk: Any):
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        desk = self._desk
        yield _gauge("active", "requests running or waiting", desk.active)
        yield _gauge("ready", "1 if the model is loaded", desk.keeper.state == "ready")
        yield CounterMetricFamily(
            "mlx_llama_set_asides",
            "requests set aside while memory was short, and computed again later",
            value=desk.keeper.set_asides,
        )
        llm = desk.keeper.llm
        if llm is None:
            return
        scheduler = llm.loop.scheduler
        yield _gauge("rows", "rows of the cache", scheduler.max_rows)
        yield _gauge("rows_running", "rows with a running request", len(scheduler.queues.admitted))
        yield _gauge("queue", "requests that wait for a row", len(scheduler.queues.waiting))
        yield _gauge("cache_bytes", "bytes of keys and values", scheduler.cache.nbytes)
        if scheduler.rows.budget is not None:
            yield _gauge(
                "cache_budget_bytes", "bytes that keys and values may take", scheduler.rows.budget
            )


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"mlx_llama_{name}", about, value=float(value))
