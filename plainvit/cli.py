"""Words -> a call: `plainvit VERB ...`. Each verb is imported inside its function, so --help never loads torch.

Exit codes: 0 done, 2 usage, 3 data, 4 diverged (of a study: runs failed), 5 resources, 130/143 signals.
"""

import functools
import os
import sys
from collections.abc import Callable

from tyro.conf import DisallowNone

from plainvit import __version__
from plainvit.config import nearest
from plainvit.verbs import analyse, data, evaluate, models, paper, predict, probe, runs, study, vtab
from plainvit.verbs.words import READING, Processes, fail, parsed, show_records_visibly

VERBS: dict[str, Callable[..., object]] = {
    "train": runs.Train,
    "finetune": runs.Finetune,
    "recipes": runs.recipes,
    "plan": runs.Plan,
    "doctor": runs.Doctor,
    "replay": runs.replay,
    "evaluate": evaluate.score,
    "compare": evaluate.compare,
    "predict": predict.predict,
    "embed": predict.embed,
    "analyse": analyse.analyse,
    "models": models.models,
    "inspect": models.inspect,
    "weights": models.weights,
    "convert": models.convert,
    "probe": probe.probe,
    "vtab": vtab.vtab,
    "study": study.study,
    "study list": study.listing,
    "paper": paper.paper,
    "data info": data.info,
    "data check": data.check,
    "data pack": data.pack,
}


def main(arguments: list[str] | None = None) -> None:
    """The command. Errors that a user can mend are one line on standard error."""
    show_records_visibly()
    try:
        try:
            _call(sys.argv[1:] if arguments is None else arguments)
        finally:
            _flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.exit(0)
    except (ValueError, OSError) as error:
        from plainvit.disk import exit_code_of

        if getattr(error, "agreed", False) and os.environ.get("RANK", "0") != "0":
            sys.exit(exit_code_of(error))  # the first of several processes says it
        fail(_said(error), exit_code_of(error))
    except (RuntimeError, MemoryError) as error:
        from plainvit.device import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        said = str(error) or type(error).__name__
        fail(f"memory does not suffice, a smaller --batch might: {said.splitlines()[0]}", 5)
    except KeyboardInterrupt:
        sys.exit(130)


def _said(error: Exception) -> str:
    """In one line; of an error of the system without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).splitlines()[0]


def _call(arguments: list[str]) -> None:
    verb = next((" ".join(arguments[:n]) for n in (2, 1) if " ".join(arguments[:n]) in VERBS), None)
    if verb is None:
        _overview(arguments)
        return
    from plainvit import device

    device.prepare()
    rest = arguments[len(verb.split()) :]
    if verb in runs.RUNS:
        done = runs.run(verb, rest)
    else:
        done = parsed(_deferred(VERBS[verb]), verb, rest, config=(*READING, DisallowNone))()
    if isinstance(done, Processes):
        from plainvit.runtime.launch import launch

        sys.exit(launch(arguments, *done))
    if "RANK" in os.environ:  # the work is done and on disk; PyTorch's teardown of its threads may yet abort
        _flush()
        sys.stderr.flush()
        os._exit(0)


def _flush() -> None:
    """What was printed, now: of a failure at its own end Python tells in its own words, and exits with 120."""
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left of it
        if not isinstance(error, BrokenPipeError):
            raise


def _deferred(call: Callable[..., object]) -> Callable[..., Callable[[], object]]:
    """The same parameters, but calling it only binds them."""

    @functools.wraps(call)
    def bind(*values: object, **named: object) -> Callable[[], object]:
        return functools.partial(call, *values, **named)

    return bind


def _overview(arguments: list[str]) -> None:
    """All verbs, or those that begin with the word given; anything else is an error with the nearest verb."""
    word = arguments[0] if arguments else "--help"
    if word == "--version":
        print(f"plainvit {__version__}")
        return
    verbs = [verb for verb in VERBS if word in ("-h", "--help") or verb.split()[0] == word]
    if not verbs or not set(arguments[1:]) <= {"-h", "--help"}:
        words = " ".join(arguments[:2])
        hint = "docs/production.md shows how to go without" if word in ("export", "serve") else nearest(words, VERBS)
        fail(f"there is no verb {words!r}; {hint}", 2)
    print("plainvit: Vision Transformers, from raw images to an answer.\n")
    for verb in verbs:
        print(f"  plainvit {verb:12} {(VERBS[verb].__doc__ or '').splitlines()[0]}")
    print("\nplainvit VERB --help tells more of each; plainvit --version prints the version.")
