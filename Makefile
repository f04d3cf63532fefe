# Two commands: `make demo` and `make test`. Both need Python >= 3.11 and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# torch is pinned in constraints.txt. Where only its CUDA build is to be had, install the CPU build
# into .venv first; pip then keeps it.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ifneq ($(wildcard ../shared/data),)
export FEDSHIFT_DATA ?= $(abspath ../shared/data)
endif

.PHONY: demo test test-slow test-flower docs lint format lock audit bench bench-qp clean

$(VENV)/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  "fedshift needs Python 3.11 or newer, this is %d.%d; try: make PYTHON=python3.12 demo" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@echo "installing fedshift and what it needs into $(VENV) (torch is the largest: 200 MB for the CPU build)"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) -e '.[dev,vision,report,flower,ops]'
	@touch $@

demo: $(VENV)/.core
	$(BIN)/fedshift demo

# Compiled files are kept, whatever the environment says: pytest's are a fifth of a run's time.
test test-slow: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# A file's tests run in one process, in order: what they share (a fixture of the module, workers, runs
# to compare with) is made once.
# A federation of real processes waits half of its time, for processes that start: three files run
# side by side, each with folders and ports of its own. A file's tests share its federation.
test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m slow -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/deploy
	$(BIN)/python -m pytest -q -m slow -n 3 --dist loadfile --no-loadscope-reorder tests/deploy

# The same with another version of Flower, in an environment of its own. What 1.42 asks for in other
# versions than 1.41 is not pinned.
FLWR ?= 1.42.0
OTHER := build/flower-$(FLWR)
test-flower:
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(flwr|uv|certifi)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet -c $(OTHER)/constraints.txt -e '.[dev,vision,report,flower,ops]' 'flwr==$(FLWR)'
	$(OTHER)/bin/python -m pytest -q tests/flower tests/deploy

$(VENV)/.docs: $(VENV)/.core
	$(PIP) -e '.[docs]'
	@touch $@

# The site, in build/site; a warning (a broken link, a page outside the navigation) is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open build/site/index.html"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What a federation's machines need, with the hashes of all files; and the build of torch that pip
# gets here, which is to be installed first. uv knows no packages of the CUDA build (pyproject.toml).
LOCK := requirements.lock
lock: $(VENV)/.dev
	$(BIN)/uv pip compile --quiet pyproject.toml --extra flower --extra ops --extra report \
	  -c constraints.txt --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-emit-index-url --custom-compile-command "make lock" --output-file $(LOCK)
	rm -rf build/torch
	$(BIN)/python -m pip download --quiet --no-deps --dest build/torch "$$(grep '^torch==' constraints.txt)"
	cd build/torch && for wheel in *; do echo "torch==$$(echo "$$wheel" | cut -d - -f 2)" \
	  "--hash=sha256:$$(sha256sum "$$wheel" | cut -d ' ' -f 1)"; done > ../../torch.lock

# Known faults of the locked packages. Strict: a package that could not be looked up is no good news.
audit: $(VENV)/.dev
	@$(PIP) pip-audit
	@$(BIN)/pip-audit --strict --require-hashes --disable-pip -r $(LOCK) || { \
	  echo "make audit: a fault, or the index gave no data on faults (as the lines above say): then run it elsewhere"; \
	  exit 1; }

# All of them, for a quiet machine; `make bench BENCH=--quick` tries them out.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/all.py $(BENCH)

bench-qp: $(VENV)/.dev
	$(BIN)/python benchmarks/qp.py

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
