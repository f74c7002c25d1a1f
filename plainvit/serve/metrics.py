"""Counters and histograms of a server, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("plainvit_requests", "Answered requests", ["path", "status"], registry=registry)
        self.images = Counter("plainvit_images", "Images by outcome", ["model", "outcome"], registry=registry)
        self.waiting = Gauge(
            "plainvit_waiting_images", "Images accepted and not answered", ["model"], registry=registry
        )
        self.request_seconds = Histogram("plainvit_request_seconds", "Time to answer", ["path"], registry=registry)
        self.batch_seconds = Histogram("plainvit_batch_seconds", "Time of a forward pass", ["model"], registry=registry)
        options = {"registry": registry, "buckets": (1, 2, 4, 8, 16, 32, 64)}
        self.batch_images = Histogram("plainvit_batch_images", "Images in a forward pass", ["model"], **options)

    def render(self) -> bytes:
        return generate_latest(self.registry)
