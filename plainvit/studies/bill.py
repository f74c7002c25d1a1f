"""What a study would cost: the steps, images, exaFLOPs and H200-hours of each arm, before it is run.

    plainvit study positions --budget paper
    bill([study("positions")], "paper")["total"]["exaflops"]

The arithmetic is that of `plainvit plan`. Runs that several arms or studies share are paid for once, by the first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from plainvit.config import Config, Model, ViTConfig, pair
from plainvit.planning.plan import plan
from plainvit.studies.runs import run_hash
from plainvit.studies.study import SEEDS, Arm, Budget, Study, stages

ON = "h200"
SUMS = ("runs", "images", "exaflops", "h200_hours")


def bill(studies: Sequence[Study], budget: Budget, seeds: int = 0) -> dict[str, Any]:
    """A row for each arm of each study, and the total; JSON."""
    paid: dict[str, str] = {}
    rows = [row for study in studies for row in _of_study(study, budget, seeds or SEEDS[budget], paid)]
    # An arm whose length is not known has no sum, and is said to be missing from it
    total = {name: sum(row[name] or 0 for row in rows) for name in SUMS}
    return {"budget": budget, "seeds": seeds or SEEDS[budget], "on": ON, "arms": rows, "total": total}


def _of_study(study: Study, budget: Budget, seeds: int, paid: dict[str, str]) -> list[dict[str, Any]]:
    """In the order in which they are run; `paid` keeps who pays for a run."""
    arms = study.arms(budget)
    keys: dict[str, str] = {}
    models: dict[str, Model] = {}
    rows: list[dict[str, Any]] = []
    for name in (name for stage in stages(arms) for name in stage):
        arm = arms[name]
        edit = arm.edit.__name__ if arm.edit else ""
        keys[name] = " ".join((run_hash(arm.config), edit, keys.get(arm.after, "")))
        try:
            models[name] = _model(arm, models.get(arm.after))
        except ValueError as error:
            raise ValueError(f"{study.name}, {name} cannot be planned: {error}") from error
        payer = paid.setdefault(keys[name], f"{study.name}, {name}") if arm.trained else ""
        row = {"study": study.name, "arm": name, "after": arm.after or None}
        first = payer == f"{study.name}, {name}"
        found = (
            _cost(arm.config, models[name], seeds) if first else dict.fromkeys(("reads_one_token", "steps", *SUMS), 0)
        )
        rows.append(row | found | {"paid_by": None if first else payer or "no run"})
    return rows


def _model(arm: Arm, before: Model | None) -> Model:
    """The arm's own, or that of the arm it begins from at its size with a new head."""
    config = arm.config
    if config.model is not None:
        return config.model
    if before is None:
        raise ValueError(f"the model of {config.init or 'an arm'} is not in its config: its cost cannot be told")
    size = pair(config.image_size) if config.image_size else before.image_size
    changes = {"representation": 0} if isinstance(before, ViTConfig) else {}
    return before.replace(image_size=size, classes=0, **changes)


def _cost(config: Config, model: Model, seeds: int) -> dict[str, Any]:
    """Of all its seeds; one device, its batch in parts that fit."""
    known = config.replace(model=model, init="", data=config.data or "jft")  # the recipes leave JFT's place to the user
    report = plan(known, on=ON)
    run, mode = report["run"], report["modes"][report["chosen"]]

    def times(value: float | None) -> float | None:
        return None if value is None else seeds * value

    return {
        "reads_one_token": isinstance(model, ViTConfig) and model.reads_one_token,
        "steps": run["steps"],
        "runs": seeds,
        "images": times(run["seen"]),
        "exaflops": times(run["exaflops"]),
        "h200_hours": times(mode.get("device_hours")),
    }


# For people -----------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> Group:
    """A line for each arm, the sum below."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("arm", style="cyan", overflow="fold")
    for title in ("runs", "steps each", "images, M", "exaFLOPs", "H200 hours"):
        shown.add_column(title, justify="right")
    last = ""
    for row in found["arms"]:
        if row["study"] != last:
            shown.add_row(Text(last := row["study"], style="bold"))
        if row["paid_by"]:
            words = "no run" if row["paid_by"] == "no run" else f"as {row['paid_by']}"
            shown.add_row(Text(f"  {row['arm']} ({words})", style="dim"))
        else:
            shown.add_row(Text(f"  {row['arm']}"), str(row["runs"]), *map(_short, (row["steps"], *_sums(row))))
    total = found["total"]
    shown.add_row("in all", str(total["runs"]), "", *map(_short, _sums(total)), style="bold")
    lacking = sum(row["exaflops"] is None or row["h200_hours"] is None for row in found["arms"])
    notes = [
        f"{found['seeds']} seeds each. H200-hours by a measured "
        "model of one of them (convolutions: a guess); evaluation is not counted."
    ]
    paid = [row for row in found["arms"] if row["paid_by"] is None]
    if len({row["reads_one_token"] for row in paid}) > 1:
        notes.append(
            "Where the head reads the class token alone, the last block is computed for that token only: such a model "
            "takes fewer hours than its exaFLOPs say, which count every token."
        )
    if lacking:
        notes.append(f"{lacking} arms have a length or a time that is not known: they are missing from the sum.")
    return Group(shown, "", *notes)


def _sums(row: Mapping[str, Any]) -> tuple[float | None, ...]:
    images = None if row["images"] is None else row["images"] / 1e6
    return images, *(row[name] for name in SUMS[2:])


def _short(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
