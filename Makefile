# The front door. Every target sets itself up on a fresh machine and re-uses what is there on the next run.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install -q -c constraints.txt

.PHONY: demo test test-all test-oldest soak check bench bench-all docs clean help

help:
	@echo "make demo      PPO learns CartPole-v1 (half a minute), curve in demo.png"
	@echo "make test      the tests"
	@echo "make test-all  all tests, long ones and GPU ones too"
	@echo "make soak      workers that fail at random, every frame checked"
	@echo "make test-oldest  the core of the tests, with the oldest libraries that are allowed, in .venv-oldest"
	@echo "make check     lint and types"
	@echo "make bench     the scoreboard: reap beside a hand-written loop and TorchRL (six minutes)"
	@echo "make bench-all every workload, with peers"
	@echo "make docs      the documentation as HTML, in site/"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras: installed once, again only when the project's requirements change.
$(VENV)/.with-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing reap[$*] into $(VENV) …"
	@$(PIP) -e '.[$*]'
	@touch $@

demo: $(VENV)/.with-demo
	$(BIN)/python examples/ppo_cartpole.py

# Many tests wait for processes more than they compute: more of them at once than there are cores. They start some fifty
# interpreters, which would all compile reap where writing bytecode is switched off.
# Beside three others on two cores a worker may wait for its turn for seconds: what failed is said, and run again alone.
side_by_side = $(BIN)/python -m pytest $(1) -n 4 || { test $$? -eq 1 && echo "once more, alone, what failed beside others:" && \
		$(BIN)/python -m pytest $(1) -n 0 --last-failed; }
test test-all: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.with-test
	$(call side_by_side,-m "not slow and not cuda" $(TESTS))

test-all: $(VENV)/.with-test
	$(call side_by_side,--timeout=1800 --hypothesis-profile=new $(TESTS))

soak: $(VENV)/.with-test
	$(BIN)/python -m benchmarks.soak --faults 170 --frames 17000000 --minutes 60 --json bench-results/soak.json

# Without TorchRL, which asks for the newest tensordict of its series; tests that need it, or Ray, are skipped.
.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install -q -c constraints-oldest.txt -e . "pytest>=8" "pytest-timeout>=2.3" "pytest-xdist>=3.7" "hypothesis>=6.100"
	@touch $@

test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/python -m pytest -m "not slow and not cuda" -n 4 tests/unit tests/buffers tests/backends/test_inline.py \
		tests/backends/test_process.py tests/backends/test_multi.py tests/envs/test_gymnasium.py tests/envs/test_parallel.py

check: $(VENV)/.with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.with-bench
	$(BIN)/python -m benchmarks

bench-all: $(VENV)/.with-bench
	$(BIN)/python -m benchmarks --all

docs: $(VENV)/.with-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	@echo "site/index.html; with a search: python -m http.server -b 127.0.0.1 -d site"

clean:
	rm -rf $(VENV) .venv-oldest site build .mypy_cache .ruff_cache .pytest_cache
