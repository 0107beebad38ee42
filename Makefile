# Two commands: `make demo` shows what the template gives, `make test` proves it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO := cookiecutter torch numpy safetensors tyro tqdm
TEST := $(DEMO) pillow scikit-learn pytest pytest-xdist pytest-timeout hypothesis ruff pre-commit \
	pyyaml setuptools cruft

.PHONY: demo test lint docs clean

demo: $(VENV)/.demo
	@./demo.sh $(abspath $(BIN))

test: $(VENV)/.test
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check --config pyproject.toml .
	$(BIN)/ruff format --check --config pyproject.toml .

docs: $(VENV)/.test
	$(BIN)/python docs/cut.py

clean:
	rm -rf $(VENV) demo

$(VENV)/.demo: constraints.txt Makefile
	@echo "installing into $(VENV): a minute or two, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(DEMO)
	@touch $@

$(VENV)/.test: constraints.txt Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TEST)
	@touch $@
