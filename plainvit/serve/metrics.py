"""Counters and histograms of a server, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

IMAGES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = one = CollectorRegistry()
        self.requests = Counter("plainvit_requests", "Answered requests", ["path", "status"], registry=one)
        self.images = Counter("plainvit_images", "Images by outcome", ["model", "outcome"], registry=one)
        self.waiting = Gauge("plainvit_waiting_images", "Images accepted and not answered", ["model"], registry=one)
        self.request_seconds = Histogram("plainvit_request_seconds", "Time to answer", ["path"], registry=one)
        self.batch_seconds = Histogram("plainvit_batch_seconds", "Time of a forward pass", ["model"], registry=one)
        self.batch_images = Histogram(
            "plainvit_batch_images", "Images in a forward pass", ["model"], registry=one, buckets=IMAGES
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)
