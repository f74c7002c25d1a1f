"""The regression gate: plainvit's training speed relative to tuned timm's, compared with the committed ratio.

    make bench                                  python -m bench.gate
    python -m bench.gate --add                  write the ratio of this device into bench/figures.json

Measures ViT-B/16 as bench.train does. Exits with 1 if the ratio is more than 5 % below the committed one or if losses
differ. Exits with 0 if bench/figures.json has no ratio of this device.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measure import describe_machine, write_json, write_results
from bench.train import BASELINE, Options, make_options, make_training_parser, measure
from plainvit.disk import read_json

FIGURES = Path(__file__).with_name("figures.json")
TOLERANCE = 0.05  # of the committed ratio
PEER = "timm, tuned"


def compute_ratio(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """plainvit's speed relative to the peer's in the same rounds; None if one of them is missing."""
    peer = next((row for row in rows if row["system"] == PEER), None)
    return 1 / peer["relative_to_plainvit"] if peer else None


def check_results(results: Mapping[str, Any], device: str, figures: Mapping[str, Any]) -> tuple[int, str]:
    """(exit code, message)"""
    ratio = compute_ratio(results["rows"])
    if ratio is None:
        return 1, f"no ratio: {'; '.join(results['skipped']) or 'nothing was measured'}"
    for row in results["rows"]:
        if not row["is_valid"]:
            names = f"{row['system']} and {BASELINE}"
            return 1, f"no verdict: losses of {names} differ by {row['loss_difference']:.2g} or are not finite"
    speed = f"plainvit trains at {ratio:.3f} x {PEER} on {device}"
    if device not in figures:
        return 0, f"{speed}; bench/figures.json has no ratio of this device: --add writes it"
    committed = float(figures[device]["ratio"])
    change = ratio / committed - 1
    code = 1 if change < -TOLERANCE else 0
    return code, f"{speed}: {change:+.1%} relative to the committed {committed:.3f}"


def name_device(options: Options) -> str:
    return torch.cuda.get_device_name(options.device) if options.is_gpu else f"CPU ({describe_machine()['processor']})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_training_parser(__doc__)
    parser.add_argument("--figures", type=Path, default=FIGURES, help="JSON file with the committed ratios")
    parser.add_argument("--add", action="store_true", help="Write the ratio of this device into --figures")
    parser.set_defaults(models="B/16", systems=f"{BASELINE};timm")
    args = parser.parse_args(arguments)
    try:
        options, figures = make_options(args), read_json(args.figures)
    except ValueError as error:
        parser.error(str(error))
    results, device = measure(options), name_device(options)
    code, message = check_results(results, device, figures)
    write_results("bench.gate", arguments, args.json, title="gate", message=message, **results)
    ratio = compute_ratio(results["rows"])
    if args.add and ratio:
        entry = {"ratio": round(ratio, 4), "models": list(options.models), **describe_machine()}
        write_json(args.figures, dict(figures) | {device: entry})
    print(message, file=sys.stderr if code else sys.stdout)
    sys.exit(code)


if __name__ == "__main__":
    main()
