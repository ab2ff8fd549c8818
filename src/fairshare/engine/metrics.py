"""The Prometheus metrics of a vLLM 0.32 server: same names, labels and buckets. And those of SGLang, from the same."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SGLANG_NAMES = {
    "vllm:num_requests_running": "sglang:num_running_reqs",
    "vllm:num_requests_waiting": "sglang:num_queue_reqs",
    "vllm:kv_cache_usage_perc": "sglang:token_usage",
    "vllm:num_preemptions": "sglang:num_retracted_requests",
    "vllm:prompt_tokens": "sglang:prompt_tokens",
    "vllm:prompt_tokens_cached": "sglang:cached_tokens",
    "vllm:generation_tokens": "sglang:generation_tokens",
}

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """Values are set by the engine loop. Aborted requests are in no counter but the tokens, as in vLLM."""

    def __init__(self, model_name: str, cache_config: dict[str, str]) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"engine": "0", "model_name": model_name}
        self.running = self._gauge("num_requests_running", "Number of requests in model execution batches.")
        self.waiting = self._gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            ["engine", "model_name", "reason"],
            registry=self._registry,
        )
        self.waiting_for_capacity = by_reason.labels(**self._labels, reason="capacity")
        by_reason.labels(**self._labels, reason="deferred")
        sleep = Gauge(
            "vllm:engine_sleep_state",
            "Engine sleep state.",
            ["engine", "model_name", "sleep_state"],
            registry=self._registry,
        )
        for state, value in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
            sleep.labels(**self._labels, sleep_state=state).set(value)
        self.kv_usage = self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens."
        )
        self.prefix_hits = self._counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        for name in ("external_prefix_cache_queries", "external_prefix_cache_hits"):
            self._counter(name, "External prefix cache, in terms of number of tokens.")
        for name in ("mm_cache_queries", "mm_cache_hits"):
            self._counter(name, "Multi-modal cache, in terms of number of items.")
        self.preemptions = self._counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            ["engine", "model_name", "source"],
            registry=self._registry,
        )
        self.prompt_tokens_computed = by_source.labels(**self._labels, source="local_compute")
        self.prompt_tokens_hit = by_source.labels(**self._labels, source="local_cache_hit")
        by_source.labels(**self._labels, source="external_kv_transfer")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Number of cached prompt tokens (local + external)."
        )
        self.generation_tokens = self._counter("generation_tokens", "Number of generation tokens processed.")
        success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            ["engine", "finished_reason", "model_name"],
            registry=self._registry,
        )
        self.success = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in ("stop", "length", "abort", "error", "repetition")
        }
        rejections = Counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self.rejected_requests = rejections.labels(model_name=model_name, reason="max_num_queued_reqs")
        rejections.labels(model_name=model_name, reason="max_num_queued_tokens")
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Number of prefill tokens processed.", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Number of generation tokens processed.", _TOKENS
        )
        self.iteration_tokens = self._histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine_step.", _ITERATION
        )
        self.max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", _TOKENS
        )
        self.params_n = self._histogram("request_params_n", "Histogram of the n request parameter.", (1, 2, 5, 10, 20))
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", _TOKENS
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _FIRST_TOKEN
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _BETWEEN_TOKENS
        )
        self.per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            _BETWEEN_TOKENS,
        )
        self.whole_request = self._histogram(
            "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _REQUEST
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _REQUEST
        )
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", _REQUEST
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", _REQUEST
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", _REQUEST
        )
        self.request_preemptions = self._histogram(
            "request_num_preemptions", "Histogram of number of preemptions per request.", (1, 2, 3, 4, 5, 10, 20)
        )
        self.prefill_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill.", _TOKENS
        )
        Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            ["engine", *cache_config],
            registry=self._registry,
        ).labels(engine="0", **cache_config).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, list(self._labels), registry=self._registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, list(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, list(self._labels), registry=self._registry, buckets=buckets).labels(
            **self._labels
        )

    def collect(self) -> Iterator[Metric]:
        """What there is to show."""
        return iter(self._registry.collect())

    def render(self) -> tuple[bytes, str]:
        """The text of /metrics and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class SglangMetrics(Collector):
    """The same values under SGLang's names, as far as an engine of one scheduler has them."""

    def __init__(self, metrics: Metrics, *, model_name: str, kv_tokens: int) -> None:
        self._metrics = metrics
        # With priority scheduling, SGLang's totals have an empty priority.
        self._labels = {"model_name": model_name, "engine_type": "unified", "tp_rank": "0", "priority": ""}
        self._kv_tokens = kv_tokens
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield self._family(GaugeMetricFamily, "sglang:max_total_num_tokens", self._kv_tokens)
        for ours in self._metrics.collect():
            name = _SGLANG_NAMES.get(ours.name)
            if name is not None:
                family = CounterMetricFamily if ours.type == "counter" else GaugeMetricFamily
                yield self._family(family, name, ours.samples[0].value)

    def _family(self, family: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, value: float) -> Metric:
        made = family(name, name.partition(":")[2].replace("_", " "), labels=list(self._labels))
        made.add_metric(list(self._labels.values()), value)
        return made

    def render(self) -> tuple[bytes, str]:
        """The text of /metrics and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
