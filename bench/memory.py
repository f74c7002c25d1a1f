"""Peak memory of a training step, plainvit beside its peers, in the very configuration of bench.train's rows.

    python -m bench.memory [--models B/16] [--batch 256] [--json FILE]

Each system is built, compiled and stepped alone on the device. Peak: the most that it allocated in a step beyond what
lay there before it was built; the images are not its own. Resident: what stays between steps, weights and optimiser.
The same code measures the column of bench.train. On a CPU there is nothing to read it from: one line says so.
"""

from collections.abc import Sequence
from typing import Any

import torch

from bench.measure import GIB, machine, said, show, tell, write
from bench.train import OURS, Options, free_memory, job_of, names_of, number, options_of, parser_of, warm_up

STEPS = 5  # after the first, which compiles: enough for a capture of graphs at the third


def measure_model(name: str, options: Options, left_out: list[str]) -> list[dict[str, Any]]:
    """A row a system, and its peak over that of the tuned peer that needs least."""
    job, rows = job_of(name, options), []
    for system in names_of(options.systems):
        one = warm_up(system, job, options.parity or STEPS, left_out)
        if one is None:
            if system == OURS:  # whose weights the others would start from
                break
            continue
        row: dict[str, Any] = {"model": f"ViT-{name}", "batch": job.batch, "system": system, "first_s": one.first_s}
        row["peak_gib"] = None if one.peak is None else one.peak / GIB
        rows.append(row | {"resident_gib": None if one.resident is None else one.resident / GIB})
        one.system.close()
        del one
        torch.compiler.reset()
        free_memory(options.gpu)
    return with_ratios(rows)


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tuned = [row["peak_gib"] for row in rows if row["system"].endswith(", tuned") and row["peak_gib"] is not None]
    for row in rows:
        row["ratio"] = row["peak_gib"] / min(tuned) if tuned and row["peak_gib"] is not None else None
    return rows


def measure(options: Options) -> dict[str, Any]:
    left_out: list[str] = []
    if not options.gpu:
        tell("peak memory: no GPU, so there is nothing to read it from; the steps run all the same", left_out)
    rows = [row for name in options.models for row in measure_model(name, options, left_out)]
    columns = ("model", "system", "peak GiB", "resident GiB", "ratio to the least tuned peer")
    shown = [
        [
            f"{row['model']} x{row['batch']}",
            row["system"],
            *(
                number(row[name], form)
                for name, form in (("peak_gib", ".2f"), ("resident_gib", ".2f"), ("ratio", ".3f"))
            ),
        ]
        for row in rows
    ]
    show("memory of a training step", columns, shown, left=("model", "system"))
    return {"machine": machine(), "rows": rows, "left_out": left_out}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__ or "")
    words = parser.parse_args(arguments)
    try:
        options = options_of(words)
    except ValueError as error:
        parser.error(str(error))
    found = measure(options)
    if words.json:
        write(words.json, {"title": "memory of a training step", "command": said("bench.memory", arguments), **found})


if __name__ == "__main__":
    main()
