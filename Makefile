# `make demo` shows what the template gives, `make quick` checks it in a minute, `make test` tests
# it, `make slow` runs the tests that this leaves out, `make torture` tries to break it,
# `make matrix` trains every combination of answers, `make mutants` breaks a render place by place,
# `make compat` tries other releases of torch and Python, `make benchmark` and `make gpu` measure it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Most of what is installed is never imported: Python compiles what is, when it is.
# Where this is set, as in some containers, every process would compile torch anew: 3 s each.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
DEMO := cookiecutter torch numpy safetensors tyro psutil matplotlib tensorboard
TEST := $(DEMO) pillow scikit-learn pytest pytest-xdist pytest-timeout hypothesis ruff pre-commit pre-commit-hooks basedpyright \
	pyyaml jsonschema setuptools tqdm tokenizers cruft wandb mlflow-skinny sqlalchemy alembic \
	s3fs moto flask flask-cors optuna transformers peft codespell

# The peers have an environment of their own, so that tests and demo go without them.
PEERS := build/benchmark
# So has the generator of the site.
SITE := build/site-tools
TOPICS := loop save restore sampler shards optimizer startup sharded_start restart busy fit loss roofline workflow sft
TORTURE ?= crash_points kill_storm elastic damage hostile_files entrances resources stops store

# Releases of torch to try; empty: those of scripts/compat.py.
TORCH ?=

# Answers that all combinations to try have, such as "tracker=none parallelism=fsdp"; empty: every combination.
ANSWERS ?=

.PHONY: demo quick test slow torture matrix mutants compat tutorial lint docs site benchmark gpu clean

demo: $(VENV)/.demo
	@scripts/demo.sh $(abspath $(BIN))

# Lint, renders, and one life of each parallelism: after each change.
quick: $(VENV)/.test
	@$(BIN)/python -m scripts.quick

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow"

slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

torture: $(VENV)/.test
	@for topic in $(TORTURE); do $(BIN)/python -m tests.stress.$$topic || exit 1; done
	@$(BIN)/python -m tests.stress.page

matrix: $(VENV)/.test
	@$(BIN)/python -m scripts.matrix $(if $(ANSWERS),--answers $(ANSWERS))
	@$(if $(ANSWERS),,$(BIN)/python -m tests.stress.page)

# Hours: the core of a render broken at 200 places, and what no test noticed.
mutants: $(VENV)/.test
	@$(BIN)/python -m scripts.mutants

# Half an hour and some GB: other releases of torch and Python, each in an environment of its own.
compat: $(VENV)/.test
	@$(BIN)/python -m scripts.compat $(if $(TORCH),--torch $(TORCH))

# A quarter of an hour: types all of docs/tutorial/, and changes nothing.
tutorial: $(VENV)/.test
	@$(BIN)/python -m scripts.tutorial --check

# The tests and figures of one CUDA device, with the torch that PYTHON has; NANOGPT is a clone to measure beside.
gpu:
	@$(PYTHON) -m benchmarks.gpu $(if $(NANOGPT),--nanogpt $(NANOGPT))
	@$(PYTHON) -m benchmarks.page

lint: $(VENV)/.test
	$(BIN)/ruff check --config pyproject.toml .
	$(BIN)/ruff format --check --config pyproject.toml .

docs: $(VENV)/.test
	$(BIN)/python scripts/cut_docs.py

# The manual as a site, build/site/index.html; a dead link, a dead anchor or a page without a link fails.
site: $(SITE)/.installed
	$(SITE)/bin/python -m sphinx -q -E -n -W --keep-going docs build/site
	@echo "build/site/index.html"

benchmark: $(PEERS)/.installed
	@for topic in $(TOPICS); do $(PEERS)/bin/python -m benchmarks.$$topic || exit 1; done
	@for topic in goodput planning meeting; do $(PEERS)/bin/python -m benchmarks.$$topic || exit 1; done
	@$(PEERS)/bin/python -m benchmarks.page

clean:
	rm -rf $(VENV) $(PEERS) $(SITE) build/site demo

$(VENV)/.demo: constraints.txt Makefile
	@echo "installing into $(VENV): a minute or two, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(DEMO)
	@touch $@

$(VENV)/.test: constraints.txt Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TEST)
	@touch $@

$(SITE)/.installed: docs/requirements.txt
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
	@touch $@

$(PEERS)/.installed: constraints.txt benchmarks/constraints.txt Makefile
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -c benchmarks/constraints.txt $(DEMO) accelerate lightning transformers peft trl
	@touch $@
