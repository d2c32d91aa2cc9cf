# Everything a newcomer needs: `make demo` and `make test`. Python >= 3.10 and make are all that must be there.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt

.PHONY: install install-dev demo test sweep-part test-full test-newest slurm ways model-facts kernels-aot lint docs gpu-check clean

install: .venv/installed        ## a virtual environment with Optimus in it
install-dev: .venv/installed-dev

.venv/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Optimus needs Python 3.10 or newer; this is " + sys.version)'
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/pip pyproject.toml requirements/constraints.txt
	@echo "Installing Optimus into .venv (PyTorch is large: a few minutes on a slow line)"
	@$(PIP) --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "Installing what tests and benchmarks need"
	@$(PIP) --editable '.[dev]'
	@touch $@

.PHONY: install-evaluate install-wandb install-mlflow install-dedup install-remote install-s3 install-gcs install-hf install-plot install-tensorboard install-ray install-bench install-all
install-evaluate install-wandb install-mlflow install-dedup install-remote install-s3 install-gcs install-hf install-plot install-tensorboard install-ray install-bench install-all: install-%: install  ## an optional extra: tasks (lm-eval), Weights & Biases, rivals
	@$(PIP) --editable '.[$*]'

demo: install                   ## text to evaluated model in minutes, with what every machine has
	@$(BIN)/python examples/demo.py

# Compiled modules are kept, whatever the shell says: tests start hundreds of programs. Four, as two of them often wait.
# WAY=avx2, plain, threads, one-core or busy runs them as another machine would (tests/lib/ways.py).
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python tests/lib/ways.py $(BIN)/python -m pytest --numprocesses 4 --dist worksteal --durations 10 --durations-min 5

# build/test-seconds.json has the seconds of each test of the last run.
test: install-dev lint          ## lint and the tests, but for those that have turns
	@$(PYTEST)

sweep-part: install-dev         ## a tenth of the tests, and of those that have turns this commit's, in one of six ways and at most SWEEP_MINUTES=12; says how to repeat it
	@SWEEP=turn $(PYTEST)

ways: install-dev               ## the tests in all six ways, one after the other: some two hours
	@for way in as-it-is avx2 plain threads one-core busy; do WAY=$$way $(PYTEST) || exit 1; done

test-full: install-dev lint     ## lint and all tests, with all cases of those that have turns; hours
	@SWEEP=all $(PYTEST)

model-facts: install-dev        ## facts of every causal class of transformers anew: tests/model/foreign/facts.json; ten minutes
	@PYTHONPATH=.:tests/lib OMP_NUM_THREADS=1 $(BIN)/python -m helpers.model_facts

kernels-aot: install-dev        ## every kernel compiled for every chip of the table: shared memory, registers, spills; TRITON=folder of another
	@OMP_NUM_THREADS=1 SWEEP=all OPTIMUS_TRITON=$(TRITON) $(BIN)/python -m pytest tests/kernels/triton/test_compile.py
	@$(BIN)/python tests/lib/helpers/compiled.py

# The version that pip finds on its index, in an environment of its own: for accelerators, several gigabytes.
test-newest:                    ## tests of package, kernels, model, state and training with the newest PyTorch and libraries
	@test -x .venv-newest/bin/pip || $(PYTHON) -m venv .venv-newest
	@.venv-newest/bin/pip install --quiet --upgrade --editable ".[dev]"
	@OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest --numprocesses 4 --dist worksteal tests/test_package.py tests/kernels tests/model tests/state tests/training tests/checkpoint

slurm: install-dev              ## the tests under a real Slurm on this machine: root, and Debian's slurm-wlm and munge; for PBS slurm-wlm-torque and mpich
	@PATH="$$PATH:/usr/sbin" $(BIN)/python -m pytest -m slurm tests/launch/test_slurm.py

lint: install-dev
	@$(BIN)/ruff format --check --quiet . || (echo "run: .venv/bin/ruff format ." && exit 1)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

docs: install-dev               ## the configuration reference, from the tree itself, and the site in build/site; links are checked
	@$(BIN)/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The environment of `make install-dev` where there is one, else $(PYTHON) as it is: nothing is installed.
OUT ?= gpu-check
gpu-check:                      ## on a machine with one GPU: all that it can say in ten minutes; OUT=folder WHEELS=folder
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_check.py --output $(OUT) $(if $(WHEELS),--wheels $(WHEELS))

clean:
	rm -rf .venv demo build dist *.egg-info
