"""Counters and histograms of a server in the text format of Prometheus.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import threading
from bisect import bisect_left
from collections import defaultdict

Labels = tuple[tuple[str, str], ...]
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
HISTOGRAMS = {
    "request_seconds": ("Time from the first byte of a request to its answer.", SECONDS),
    "batch_seconds": ("Time of one forward pass.", SECONDS),
    "batch_images": ("Images in one forward pass.", (1, 2, 4, 8, 16, 32, 64)),
}
COUNTERS = {"requests_total": "Answered requests.", "images_total": "Images, by outcome."}
GAUGES = {"waiting_images": "Images that were accepted and not answered yet."}


class Metrics:
    """Numbers of one server; threads may add to it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counters: dict[tuple[str, Labels], float] = defaultdict(float)
        self.histograms: dict[tuple[str, Labels], list[float]] = {}  # counts per bucket, one above all, the sum

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        with self.lock:
            self.counters[name, tuple(labels.items())] += amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        edges = HISTOGRAMS[name][1]
        with self.lock:
            row = self.histograms.setdefault((name, tuple(labels.items())), [0.0] * (len(edges) + 2))
            row[bisect_left(edges, value)] += 1
            row[-1] += value

    def render(self, waiting: dict[str, int]) -> str:
        """All numbers as text; `waiting` is the number of waiting images of each model."""
        with self.lock:
            lines = [*self._render_histograms()]
            for name, help_text in COUNTERS.items():
                lines += _header(name, help_text, "counter")
                rows = (item for item in self.counters.items() if item[0][0] == name)
                lines += [f"plainvit_{name}{_braces(labels)} {value:g}" for (_, labels), value in rows]
        for name, help_text in GAUGES.items():
            lines += _header(name, help_text, "gauge")
            lines += [f"plainvit_{name}{_braces((('model', model),))} {value}" for model, value in waiting.items()]
        return "\n".join(lines) + "\n"

    def _render_histograms(self) -> list[str]:
        lines = []
        for name, (help_text, edges) in HISTOGRAMS.items():
            lines += _header(name, help_text, "histogram")
            for (_, labels), row in (item for item in self.histograms.items() if item[0][0] == name):
                total = 0.0
                for edge, count in zip((*(f"{edge:g}" for edge in edges), "+Inf"), row, strict=False):
                    total += count
                    lines.append(f"plainvit_{name}_bucket{_braces((*labels, ('le', edge)))} {total:g}")
                lines += [f"plainvit_{name}_sum{_braces(labels)} {row[-1]:g}"]
                lines += [f"plainvit_{name}_count{_braces(labels)} {total:g}"]
        return lines


def _header(name: str, help_text: str, kind: str) -> list[str]:
    return [f"# HELP plainvit_{name} {help_text}", f"# TYPE plainvit_{name} {kind}"]


def _braces(labels: Labels) -> str:
    escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{name}="{value.translate(escape)}"' for name, value in labels) + "}"
