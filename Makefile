# Two commands do everything: `make demo` and `make test`. Both set up .venv first, and only when it is out of date.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test test-slow check docs package bench bench-gpu lock clean

setup: $(READY)

# Rebuilt when the locked dependencies or the package's own declaration change.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "plainvit needs Python 3.11 or newer: make PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(BIN)/plainvit train digits

test: setup
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python -m pytest -n auto

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The site, docs/_build/html/index.html; notebooks run again when they or the package changed.
docs: setup
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html

# A wheel and an sdist in dist/, the same bytes for the same commit. Needs `pip install build`.
package:
	rm -rf dist build
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(PYTHON) -m build --quiet

# plainvit's training speed over timm's on this machine, against the committed ratio of bench/figures.json.
bench: setup
	$(BIN)/python -m bench.gate

# The main measurements of one GPU, the most important first: OUT is the folder for the JSON files.
GPU_OUT := $(or $(OUT),bench-gpu)
bench-gpu: setup
	mkdir -p $(GPU_OUT)
	-$(BIN)/python -m bench.gate --json $(GPU_OUT)/gate.json
	-$(BIN)/python -m bench.train --models S/16,L/16,H/14 --systems "plainvit;timm" --json $(GPU_OUT)/train.json
	-$(BIN)/python -m bench.infer --systems plainvit,timm --json $(GPU_OUT)/infer.json

# Needs uv. The lock is universal and hash-pinned, and names no index.
lock:
	uv pip compile pyproject.toml --extra test --extra docs --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --quiet --upgrade --output-file requirements.lock

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist docs/_build *.egg-info
