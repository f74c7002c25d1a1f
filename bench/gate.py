"""The regression gate: plainvit's speed over tuned timm's in the same run, against the committed figure.

    make bench                                  python -m bench.gate
    python -m bench.gate --add                  measure, and write the ratio of this device into bench/figures.json

It runs bench.train's short form. A ratio more than 5 % below the figure of this device ends with exit code 1 and one
line. For a device without a figure it prints the ratio and exits with 0. Losses that differ from timm's fail too.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measure import machine, publish, write_json
from bench.train import OURS, Options, measure, options_of, parser_of
from plainvit.disk import read_json

FIGURES = Path(__file__).with_name("figures.json")
ALLOWED = 0.05  # of the committed ratio
PEER = "timm, tuned"


def ratio_of(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """plainvit's speed over the peer's in the same rounds; None where one of the two was left out."""
    peer = next((row for row in rows if row["system"] == PEER), None)
    return 1 / peer["relative_to_plainvit"] if peer else None


def verdict(ratio: float, device: str, figures: Mapping[str, Any]) -> tuple[int, str]:
    """(exit code, one line)"""
    words = f"plainvit trains at {ratio:.3f} x {PEER} on {device}"
    if device not in figures:
        return 0, f"{words}; bench/figures.json has no figure of this device: --add writes it"
    committed = float(figures[device]["ratio"])
    change = ratio / committed - 1
    if change < -ALLOWED:
        return 1, f"{words}: {-change:.1%} below the committed {committed:.3f}, more than {ALLOWED:.0%}"
    return 0, f"{words}: {change:+.1%} against the committed {committed:.3f}"


def judge(found: Mapping[str, Any], device: str, figures: Mapping[str, Any]) -> tuple[int, str]:
    """Of a whole run of the short bench."""
    ratio = ratio_of(found["rows"])
    if ratio is None:
        return 1, f"no ratio: {'; '.join(found['left_out']) or 'nothing was measured'}"
    apart = [row for row in found["rows"] if not row["loss_difference"] <= row["loss_limit"]]
    if apart:
        return (
            1,
            f"losses of {apart[0]['system']} and {OURS} differ by {apart[0]['loss_difference']:.2g}: no gate on that",
        )
    return verdict(ratio, device, figures)


def device_name(options: Options) -> str:
    return torch.cuda.get_device_name(options.device) if options.gpu else f"CPU ({machine()['processor']})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="committed ratios by the device's name")
    parser.add_argument("--add", action="store_true", help="write the ratio of this device there")
    parser.set_defaults(short=True)
    words = parser.parse_args(arguments)
    try:
        options, figures = options_of(words), read_json(words.figures)
    except ValueError as error:
        parser.error(str(error))
    found, device = measure(options), device_name(options)
    code, line = judge(found, device, figures)
    publish("bench.gate", arguments, words.json, title="gate", line=line, **found)
    ratio = ratio_of(found["rows"])
    if words.add and ratio:
        new = {"ratio": round(ratio, 4), "models": list(options.models), **machine()}
        write_json(words.figures, dict(figures) | {device: new})
    print(line, file=sys.stderr if code else sys.stdout)
    sys.exit(code)


if __name__ == "__main__":
    main()
