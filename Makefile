# Everything runs from one environment, made on first use: `make serve` and `make test` are all a new machine needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without an NVIDIA driver, hold torch at a release that has a CPU build.
CONSTRAINT := $(if $(shell command -v nvidia-smi),,-c constraints/cpu.txt)
PROTO_ROOT := cluster/ingress/proto

.PHONY: install serve test lint format proto
install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(CONSTRAINT) -e '.[dev]'
	touch $@

serve: install
	$(BIN)/espalier serve $(ARGS)

test: install
	$(BIN)/pytest $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: install
	$(BIN)/python tests/support/generate_proto.py
