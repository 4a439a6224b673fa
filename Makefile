# make demo   train a small language model with jax_fa4 attention
# make test   run the test suite
# make lint   check format, style and types
# make clean  remove what the commands above made
#
# Each sets up what it needs in .venv first; PYTHON chooses the interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNEL_TESTS := $(addprefix tests/,cubins emulator ffi kernels)
SOURCES := $(shell find jax_fa4 kernels emulator ffi cmake -type f -not -name '*.pyc' -not -name '_ffi.so' 2>/dev/null) \
           $(wildcard CMakeLists.txt) pyproject.toml README.md LICENSE

# With an NVIDIA driver everything is installed for its GPUs; without one JAX need not look for them.
ifneq ($(wildcard /proc/driver/nvidia/version),)
GPU := ,cuda13
else
export JAX_PLATFORMS ?= cpu
endif

# Tests run what was installed, never the checkout: the current directory stays out of every import.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-kernels test-calls lint links clean

demo: $(VENV)/.demo
	$(BIN)/python examples/train_char_lm.py

# Kernels and what runs them, beside calls in JAX: about as long as each other; each prints when it ends.
test: $(VENV)/.test
	$(MAKE) --jobs=2 --output-sync=target --keep-going test-kernels test-calls

test-kernels: $(VENV)/.test
	$(BIN)/pytest $(PYTEST_ARGS) $(KERNEL_TESTS)

test-calls: $(VENV)/.test
	$(BIN)/pytest $(PYTEST_ARGS) $(KERNEL_TESTS:%=--ignore=%)

lint: $(VENV)/.test links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Lets `import jax_fa4` work from the checkout, where two of its packages live in folders of their own.
links:
	ln -sfn ../kernels jax_fa4/kernels
	ln -sfn ../emulator jax_fa4/emulator

clean:
	rm -rf $(VENV) build dist jax_fa4/_ffi.so jax_fa4/kernels jax_fa4/emulator .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python $(SOURCES)
	@echo "Installing jax_fa4 into $(VENV)"
	$(BIN)/python -m pip install --quiet --progress-bar off '.[demo$(GPU)]'
	touch $@

$(VENV)/.test: $(BIN)/python $(SOURCES)
	@echo "Installing jax_fa4 and what its tests need into $(VENV)"
	$(BIN)/python -m pip install --quiet --progress-bar off '.[test$(GPU)]'
	touch $@ $(VENV)/.demo
