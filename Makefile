# Two commands set everything up: `make demo` plans, trains and measures on this machine, `make check` tests a change
# within a minute, `make test` tests everything.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
READERS ?= $(VENV)-readers
BIN = $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
# What is imported is compiled then, and kept; pip would compile all of it.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo shapes check test test-all deepspeed lint site faults readers real clean

demo: $(VENV)/.base
	$(BIN)/python examples/demo.py demo
	$(BIN)/optrush plan examples/demo.yaml
	$(BIN)/optrush train examples/demo.yaml
	rm -rf demo/ladder
	-$(BIN)/optrush bench examples/demo.yaml --ladder benchmarks/demo-ladder.yaml --cumulative-only --out demo/ladder
	@$(BIN)/python examples/demo.py demo --closing $(VENV)

shapes: $(VENV)/.base  # questions about pictures of shapes: drawn, learnt and scored; some 5 minutes on two cores
	$(BIN)/python examples/shapes.py shapes
	$(BIN)/optrush train examples/tiny-shapes-cpu.yaml
	$(BIN)/python examples/shapes.py shapes --score runs/tiny-shapes-cpu/model

check: $(VENV)/.dev  # within a minute: linters, types, the source tree's rules, tests of what differs from main
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@{ $(BIN)/mypy && $(BIN)/python -m pytest tests/architecture; } & rules=$$!; failed=0; \
	$(BIN)/python tests/changed.py 45 || failed=1; wait $$rules || failed=1; exit $$failed

test: $(VENV)/.dev
	$(PYTEST) -m 'not slow'

test-all: $(VENV)/.dev  # further combinations of what `make test` proves, too
	$(PYTEST)

deepspeed: $(VENV)/.dev  # the tests that need DeepSpeed, which is installed for them
	$(PIP) -e '.[deepspeed]'
	$(BIN)/python -m pytest tests/techniques/test_deepspeed.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

site: $(VENV)/.docs  # the documentation, into build/site; fails for a dead link or a page without a place
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

faults: $(VENV)/.dev  # about an hour; benchmarks/faults/run.py R7 tries one
	$(BIN)/python benchmarks/faults/run.py --write

readers: $(VENV)/.base $(READERS)/.installed  # what is exported, read by transformers 4.57 and llama.cpp's converter
	$(BIN)/python benchmarks/readers/run.py $(READERS)/bin/python

real: $(VENV)/.dev  # a trained model: fine-tuned, exported, read by transformers, PEFT and as GGUF; some 6 minutes
	TQDM_DISABLE=1 $(BIN)/python benchmarks/real/run.py

# torch and numpy are those of $(VENV); the rest, which must be older, comes before them on the path
$(READERS)/.installed: benchmarks/readers/requirements.txt $(VENV)/.base
	$(PYTHON) -m venv $(READERS)
	$(READERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(READERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e .
	touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[dev]'
	touch $(VENV)/.base $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf demo build .pytest_cache .mypy_cache .ruff_cache .hypothesis
