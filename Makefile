# Two commands on a fresh machine with Python >= 3.11 and make:   make demo   make test
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt
# One thread a process: the tests run $(JOBS) processes, and torch's threads would fight for the cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(ONE_THREAD) $(PY) -m pytest -q -n $(JOBS) --dist worksteal

.PHONY: help demo test test-slow test-cpu test-seeds fuzz fuzz-today test-gpu test-hf-lowest test-hf-newest check lint format types bench bench-table figures docs docs-test docs-serve clean

help:
	@echo "make demo         train and compare the encodings; the report is out/quick/report.html (ARGS='--lang zh': in Chinese)"
	@echo "make test         install what the tests need and run them, all but the slow ones"
	@echo "make check        lint, types, documentation and every test: about half an hour on two cores"
	@echo "make test-slow    the slow tests"
	@echo "make test-cpu     the numerical tests with the instructions of older CPUs"
	@echo "make test-seeds   the numerical tests with ten seeds, on three instruction sets"
	@echo "make fuzz         random draws for the engines: ARGS='--engine cpu --count 1000 --seed 1', see --help"
	@echo "make test-hf-lowest  posenc.hf with the oldest transformers it supports"
	@echo "make test-hf-newest  its harness with the newest transformers that pip finds"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "make docs         the documentation site, out/site/index.html; links, anchors and code are checked"
	@echo "make docs-test    the same, then opened in a browser"
	@echo "make docs-serve   the site at http://127.0.0.1:8000 while you write"
	@echo "make lint, format, types, bench, bench-table, figures, clean"

demo: $(VENV)/.demo
	@echo "make demo: trains small models for about five minutes; the answer is at the end and in out/quick/report.html"
	$(PY) -m posenc compare --preset quick --out out/quick $(ARGS)
	@echo
	@echo "What to do next:"
	@echo "  open out/quick/report.html in a browser     the answer, a figure, a table; in English and Chinese (中文)"
	@echo "  . $(VENV)/bin/activate                      activate the environment; then:"
	@echo "  posenc list                                 every encoding; posenc show rope+yarn:8 for one of them"
	@echo "  posenc compare --text FOLDER                the same on your own text"
	@echo "  pip install -c constraints.txt -e '.[explorer]' && posenc explore    every encoding in the browser"

test: $(VENV)/.dev
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: $(VENV)/.dev
	$(PYTEST) -m slow $(ARGS)

# PyTorch's kernels for CPUs without AVX-512 and without AVX2 round differently; `test` runs the machine's own. Kernels of GPUs, which an
# interpreter or an emulator runs, and how people use models do not depend on that.
CAPABILITIES := default avx2
NUMERICAL := $(addprefix --ignore=,$(wildcard tests/engines/test_triton*.py tests/engines/test_gluon*.py)) \
	--ignore=tests/encodings/test_contextual_kernels.py --ignore=tests/hf/uses tests/core tests/encodings tests/engines tests/hf tests/nn \
	tests/test_functional.py
test-cpu: $(CAPABILITIES:%=test-cpu-%)

test-cpu-%: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=$* $(PY) -c 'import torch; print("ATen:", torch.backends.cpu.get_cpu_capability())'
	ATEN_CPU_CAPABILITY=$* $(PYTEST) -m 'not slow' $(NUMERICAL) $(ARGS)

# The numerical tests with ten seeds on three instruction sets: an hour on two cores; docs/exam.md records a run.
SEEDS := 0 1 2 3 4 5 6 7 8 9
test-seeds: $(VENV)/.dev
	set -e; for capability in $(CAPABILITIES) avx512; do for seed in $(SEEDS); do \
		echo "ATEN_CPU_CAPABILITY=$$capability POSENC_SEED=$$seed"; \
		ATEN_CPU_CAPABILITY=$$capability POSENC_SEED=$$seed $(PYTEST) -m 'not slow' $(NUMERICAL) $(ARGS); done; done

fuzz: $(VENV)/.dev
	$(ONE_THREAD) $(PY) -m tests.fuzz -j $(JOBS) $(ARGS)

test-gpu: $(VENV)/.dev
	$(PY) -m pytest -q -m gpu $(ARGS)

# posenc.hf at the lower end of the transformers that it declares; `test` runs it at the upper end
LOWEST := $(VENV)/transformers-lowest
test-hf-lowest: $(LOWEST)/.done
	PYTHONPATH=$(LOWEST) $(PY) -c 'import transformers as t; assert t.__version__ == "5.16.1", t.__version__'
	PYTHONPATH=$(LOWEST) $(PYTEST) -m 'not slow' tests/hf $(ARGS)

$(LOWEST)/.done: $(VENV)/.dev
	$(PY) -m pip --disable-pip-version-check install --quiet --upgrade --no-deps --target $(LOWEST) \
		transformers==5.16.1 'huggingface-hub>=1.5,<2'
	@touch $@

# The harness with the newest transformers, whatever it is: no version is refused, only families whose checks fail
NEWEST := $(VENV)/transformers-newest
test-hf-newest: $(VENV)/.dev
	$(PY) -m pip --disable-pip-version-check install --quiet --upgrade --no-deps --target $(NEWEST) \
		transformers huggingface-hub tokenizers safetensors
	PYTHONPATH=$(NEWEST) $(PY) -c 'import transformers as t; print("transformers", t.__version__)'
	PYTHONPATH=$(NEWEST) $(PYTEST) tests/hf/families tests/hf/test_interface.py tests/hf/test_swap.py tests/hf/test_extension.py tests/hf/test_construction.py $(ARGS)

# Everything; .ci/run does what fits its time. A thousand draws of the fuzz with a seed that changes by the day, and the suite last.
check: lint types docs test-cpu test-hf-lowest test-hf-newest test-slow fuzz-today test

fuzz-today:
	$(MAKE) fuzz ARGS="--count 1000 --seed $$(date -u +%Y%m%d)"

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# the package, then a user's scripts by its published types
types: $(VENV)/.dev
	$(PY) -m mypy
	$(PY) -m pytest -q -m slow tests/typing

bench: $(VENV)/.dev
	$(PY) -m posenc bench $(ARGS)

bench-table: $(VENV)/.dev
	$(PY) -m docs.site.readme

figures: $(VENV)/.dev
	$(PY) docs/figures.py

# MathJax comes as files in a package for another tool; only its files are wanted, so it is installed beside the environment.
MATHJAX := $(VENV)/mathjax
docs: $(VENV)/.docs
	$(ONE_THREAD) $(PY) -m docs.site

docs-test: docs $(VENV)/.dev
	$(PYTEST) -m slow tests/docs $(ARGS)

docs-serve: $(VENV)/.docs
	$(PY) -m docs.site --serve

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[docs]'
	$(PIP) --no-deps --upgrade --target $(MATHJAX) sphinx-mathjax-offline
	@touch $@

clean:
	rm -rf $(VENV) out build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The stamps make an install that is already done cost nothing; a changed dependency does it again.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "posenc needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Use: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[lab]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps --upgrade --target $(VENV)/torchao torchao  # beside the environment: transformers would import it in every process
	$(PIP) --no-deps --upgrade --target $(VENV)/timm timm  # an oracle of image encodings, where transformers does not find it: it would need torchvision
	@[ "$$(uname)" != Linux ] || $(PY) -c 'import triton' 2>/dev/null || { echo "$(PIP) triton==3.9.0"; $(PIP) triton==3.9.0; }
	@touch $@
