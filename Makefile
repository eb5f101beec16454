# The front door. Every target sets itself up on a fresh machine and re-uses what is there on the next run.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install -q -c constraints.txt

.PHONY: demo test test-all check bench bench-all docs clean help

help:
	@echo "make demo      PPO learns CartPole-v1 (half a minute), curve in demo.png"
	@echo "make test      the tests"
	@echo "make test-all  all tests, long ones and GPU ones too"
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
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.with-test
	$(BIN)/python -m pytest -m "not slow and not cuda" -n 4

test-all: $(VENV)/.with-test
	$(BIN)/python -m pytest --timeout=1800 --hypothesis-profile=new

check: $(VENV)/.with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.with-bench
	$(BIN)/python -m benchmarks

bench-all: $(VENV)/.with-bench
	$(BIN)/python -m benchmarks --all

docs: $(VENV)/.with-docs
	$(BIN)/mkdocs build --strict -q
	@echo "site/index.html"

clean:
	rm -rf $(VENV) site build .mypy_cache .ruff_cache .pytest_cache
