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

        def count(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"mlx_llama_{name}", about, labels, registry=self.registry)

        def measure(name: str, about: str) -> Histogram:
            name = f"mlx_llama_{name}_seconds"
            return Histogram(name, about, buckets=_SECONDS, registry=self.registry)

        self.requests = count("requests", "requests to the model by outcome", "outcome")
        self.http = count("http_responses", "responses by status", "status")
        self.prompt_tokens = count("prompt_tokens", "tokens of prompts")
        self.reused_tokens = count("prompt_tokens_reused", "tokens of prompts found in the cache")
        self.prefix_hits = count("prefix_hits", "requests whose prompt began in the cache")
        self.generated_tokens = count("generated_tokens", "tokens generated")
        self.first_token = measure("first_token", "from a request to its first token")
        self.between_tokens = measure("between_tokens", "from a token to the next")

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

    def watch(self, admission: Any) -> None:
        """Report the state of a admission and its scheduler at each scrape."""
        self.admission = admission
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Read the state, for the registry."""
        admission = self.admission
        yield _gauge("active", "requests running or waiting", admission.active)
        yield _gauge("ready", "1 if the model is loaded", admission.holder.state == "ready")
        yield CounterMetricFamily(
            "mlx_llama_preemptions",
            "requests preempted while memory was short, and recomputed later",
            value=admission.holder.preemptions,
        )
        llm = admission.holder.llm
        if llm is None:
            return
        scheduler = llm.loop.scheduler
        yield _gauge("rows", "rows of the cache", scheduler.max_rows)
        yield _gauge("rows_running", "rows with a running request", len(scheduler.admitted))
        yield _gauge("queue", "requests that wait for a row", len(scheduler.waiting))
        yield _gauge("cache_bytes", "bytes of keys and values", scheduler.cache.nbytes)
        if scheduler.rows.budget is not None:
            yield _gauge(
                "cache_budget_bytes", "maximum bytes of keys and values", scheduler.rows.budget
            )


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"mlx_llama_{name}", about, value=float(value))
