# make demo: pictures in a minute. make test: everything CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

export HF_HUB_OFFLINE = 1

.PHONY: demo test slow native lint clean

demo: $(INSTALLED)
	$(BIN)/st2i demo --out st2i-demo

test: lint native
	$(BIN)/python -m pytest -n 2 --dist loadfile

slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

# The C++ core under sanitizers. pip has CMake where the system has none.
native: export PATH := $(PATH):$(CURDIR)/$(BIN)
native: $(INSTALLED)
	command -v cmake >/dev/null || $(BIN)/python -m pip install --quiet -c constraints.txt cmake
	cmake -S csrc/tests -B build/native
	cmake --build build/native --parallel 2
	cd build/native && ctest --output-on-failure

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first: an open range would pull a device build of several gigabytes on a CPU machine.
$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build st2i-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
