"""Mutation testing: how many random faults in the package does the fast set of tests catch?

    pip install coverage
    coverage run -m pytest -n 0 && python -m bench.mutations --count 60 --seed 0

The first command records which test runs which line (`dynamic_context` in pyproject.toml). The second changes one
operator, constant, condition or statement at a time in a copy of the repository, and runs the tests that run the
changed line until one fails. A fault in a line that no test runs counts as survived.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDS_GPU = ("_kernels.py", "graphs.py", "fp8.py")  # files that need a CUDA device
TIMEOUT = 300  # seconds; an endless loop counts as caught

OPPOSITES: dict[type, type] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    path: str
    line: int
    before: str
    after: str
    source: str  # the whole file after the change


def mutate_node(node: ast.AST) -> ast.AST | None:
    """The node with a fault, or None if there is nothing to change."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in OPPOSITES:
            return ast.Compare(left, [OPPOSITES[type(operator)]()], [right])
        case ast.BinOp(left, operator, right) if type(operator) in OPPOSITES:
            return ast.BinOp(left, OPPOSITES[type(operator)](), right)
        case ast.BoolOp(operator, values):
            return ast.BoolOp(OPPOSITES[type(operator)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            return ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            return ast.IfExp(test, orelse, body)
        case ast.Return(value) if ast.unparse(value or ast.Constant(None)) != "None":
            return ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()):
            return ast.Pass()
    return None


def find_mutations(path: Path) -> Iterator[Mutation]:
    """All single faults in the functions of one file."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            mutant = mutate_node(node)
            if mutant is None or node.lineno != node.end_lineno:
                continue
            line = lines[node.lineno - 1].encode()
            before = line[node.col_offset : node.end_col_offset].decode()
            after = ast.unparse(ast.fix_missing_locations(mutant))
            after = after if isinstance(node, ast.stmt) else f"({after})"
            changed = line[: node.col_offset] + after.encode() + line[node.end_col_offset :]
            text = "".join([*lines[: node.lineno - 1], changed.decode(), *lines[node.lineno :]])
            if compiles(text):  # not inside an f-string or a pattern
                yield Mutation(path.relative_to(ROOT).as_posix(), node.lineno, before, after, text)


def compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def draw_mutations(count: int, seed: int) -> list[Mutation]:
    """A random sample of all faults, at most one per line."""
    files = [path for path in sorted(ROOT.glob("plainvit/**/*.py")) if not path.name.endswith(NEEDS_GPU)]
    candidates = {(m.path, m.line): m for path in files for m in find_mutations(path)}
    return random.Random(seed).sample(list(candidates.values()), count)


def find_tests(data_file: Path) -> dict[tuple[str, int], list[str]]:
    """(file, line) -> ids of the tests that run it; for lines of fixtures, all tests that run the file."""
    from coverage import CoverageData

    data = CoverageData(str(data_file))
    data.read()
    tests: dict[tuple[str, int], list[str]] = {}
    for measured in data.measured_files():
        path = Path(measured).relative_to(ROOT).as_posix()
        by_line = {
            line: sorted({"tests/{}.py::{}".format(*name.split(".")) for name in contexts if ".test_" in name})
            for line, contexts in data.contexts_by_lineno(measured).items()
        }
        in_file = sorted({test for names in by_line.values() for test in names})
        tests |= {(path, line): names or in_file for line, names in by_line.items()}
    return tests


def is_caught(mutation: Mutation, tests: list[str], repository: Path) -> bool:
    """Whether one of the tests fails with the fault."""
    if not tests:
        return False
    target = repository / mutation.path
    original = target.read_text(encoding="utf-8")
    target.write_text(mutation.source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(command, cwd=repository, env=environment, capture_output=True, timeout=TIMEOUT)
        return run.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(original, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="Number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage", help="Data file of `coverage run`")
    args = parser.parse_args()
    mutations, tests = draw_mutations(args.count, args.seed), find_tests(args.coverage)
    caught = 0
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "runs", "*.egg-info")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))
        for mutation in mutations:
            tests_of_line = tests.get((mutation.path, mutation.line), [])
            is_found = is_caught(mutation, tests_of_line, copy)
            caught += is_found
            if is_found:
                verdict = "caught"
            elif tests_of_line:
                verdict = "survived"
            else:
                verdict = "survived: no test runs this line"
            change = f"{mutation.before}  ->  {mutation.after}"
            print(f"{mutation.path}:{mutation.line}  {change}  {verdict}", flush=True)
    print(f"{caught} of {len(mutations)} faults caught")


if __name__ == "__main__":
    main()
