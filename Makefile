# make lifecycle   set up and run the pipeline              make test   set up and run the tests
#                  PROFILE=gemma-270m: with that file of profiles/, in a copy of the checkout; PROFILE='gemma-270m one-gpu': with both
# make ui          browse the runs in MLflow                make lint   ruff and mypy
# make serve       Prefect, schedules, MLflow, report       make serve-stop   stop them
# make agent       the merged model behind OpenAI's API; MODEL=rl@search, MODEL=merged+q@search: another
# make experiments a table of DVC's experiments             make plots  DVC's plots, without a network and as SVG
# make test-all    the tests, slow ones too
# make install     set up only (.venv, pinned)              make clean  remove checkpoints and tool caches, keep results
# make keep        keep the finished run, so that later reports show changes since then; NOTE="..." describes it
# make docs        generate pages: parameters and their schema, README's tables, methods, the board
# make site        the documentation as a site with search and a page per method, .bellwether/site/html/index.html
# make viewers  Inspect and Harbor, in an environment of their own: tests open with them what was exported
# make screenshots take the screenshots in docs/ (needs Chromium and its driver; after make lifecycle)
# make bench       compare speed with TRL, transformers and mergekit (an hour and 40 minutes, on an otherwise idle machine)
# make claims      run unfinished experiments of reports/claims (hours; METHOD=lite_ppo: only one; PROFILE=gemma-270m: those on that
#                  model) and generate the board
# make control     lane control: value learning on small problems, its page reports/control/page.html (METHOD=sac: one method)
#
# PYTHON=python3.12 selects the interpreter for .venv. TORCH_ARGS passes options to pip for torch only, e.g. the index of
# PyTorch's small CPU builds.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install extras lifecycle test test-all lint ui experiments plots serve serve-stop agent keep docs site viewers screenshots bench claims control lock clean

PYTHON ?= python3
TORCH_ARGS ?=
VENV := .venv
# Stages run as `python -m stages.<name>`, so the environment's python must be the first on PATH.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DVC_NO_ANALYTICS := 1
export DO_NOT_TRACK := 1
# Images of containers set it. Every stage would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@sed -n '/^$$/q;s/^# //p' Makefile

install:
	@if [ ! -x $(VENV)/bin/python ]; then \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
			|| { echo "Bellwether needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version). Set PYTHON=..." >&2; exit 1; }; \
		echo "install: creating $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv $(VENV); \
	fi
	@wanted=$$(cat requirements.lock pyproject.toml | sha256sum | cut -d' ' -f1); \
	if [ "$$(cat $(VENV)/.installed 2>/dev/null)" = "$$wanted" ]; then \
		echo "install: $(VENV) is up to date with requirements.lock"; \
	else \
		echo "install: installing requirements.lock into $(VENV) (a few minutes the first time)"; \
		pip install -qq $(TORCH_ARGS) "$$(grep '^torch==' requirements.lock)"; \
		pip install -qq -r requirements.lock; \
		pip install -qq --no-deps --no-build-isolation -e .; \
		echo "$$wanted" > $(VENV)/.installed; \
		echo "install: done"; \
	fi

# With METHOD, that of these experiments.
PROFILE ?= $(if $(METHOD),$(sort $(shell cat $(METHOD:%=reports/claims/%.yaml) 2> /dev/null | sed -n 's/^profile: *\([^ ]*\).*/\1/p')))
# Extras of this project that a profile needs.
EXTRA_gemma-270m := gemma
EXTRAS = $(strip $(foreach name,$(PROFILE),$(EXTRA_$(name))))
extras: install
	@$(if $(PROFILE),python -m stages.exchange terms $(PROFILE))
	$(foreach extra,$(EXTRAS),@pip install -qq -c requirements.lock --no-build-isolation -e '.[$(extra)]')

ifneq ($(PROFILE),)
lifecycle: extras
	python -m flows.profile $(PROFILE)
else
lifecycle: install
	@python -m stages.params > /dev/null
	@echo "lifecycle: dvc repro (curate, sft, rollout, annotate, rl, merge, evaluate, report), stages side by side"
	python -m flows.pipeline
	@python -m stages.tracking || true
	@python -m stages.runtime.speed || true
	@dvc metrics show reports/metrics.json
	@echo "lifecycle: the report is reports/report.html; 'make ui' shows the runs, 'make keep' keeps this one to compare with"
endif

# Four at a time even on two cores, since tests often wait for servers and processes to start. Tests of one file share fixtures;
# the longest files (marker `long`) start first.
AT_ONCE := -n 4 --dist loadfile --no-loadscope-reorder

test: install
	@echo "test: pytest, four at a time"
	python -m pytest -q $(AT_ONCE) --junitxml=.bellwether/tests.xml

# Including tests of entire pipelines that take too long for `make test`.
test-all: install
	python -m pytest -q --slow $(AT_ONCE)

lint: install
	ruff check .
	ruff format --check .
	mypy

# UI_ARGS='--port 5005' for another port. First, runs left as running by a power cut are ended and unsent events are sent.
ui: install
	@python -m stages.tracking --replay > /dev/null || true
	@exec python -m stages.tracking.ui $(UI_ARGS)

# Columns that differ between experiments, without hashes of data and code. EXP_ARGS='-A', '--sort-by search.merged', ...
experiments: install
	@dvc exp show --no-pager --only-changed --drop '^(data|reports|stages)/' $(EXP_ARGS)

# REVS='main ties': overlay commits, branches or experiments.
plots: install
	@python -c 'import vl_convert' 2> /dev/null || pip install -qq -c requirements.lock --no-build-isolation -e '.[plots]'
	@python -m stages.reporting.plots $(REVS)

# SERVE_ARGS='--port 4210 --mlflow-port 5010 --report-port 5011' for other ports.
serve: install
	@exec python -m flows.serve $(SERVE_ARGS)

serve-stop:
	@python -m flows.serve --stop

# AGENT_ARGS='--port 8010' for another port.
MODEL ?= merged
agent: install
	@exec python -m stages.serving --model '$(MODEL)' $(AGENT_ARGS)

# The report then shows the kept run's times and the changes since the previous one.
keep: install
	python -m stages.reporting.keep --note "$(NOTE)"
	dvc --wait-for-lock repro report

docs: install
	python -m stages.params --docs
	python -m stages.reporting.documents

site: install
	@python -m stages.reporting.site

# `harbor` without dependencies: its models need only pydantic, its server Python 3.12.
VIEWERS := .bellwether/viewers
viewers:
	@$(PYTHON) -m venv $(VIEWERS)
	@$(VIEWERS)/bin/pip install -qq "$$(grep '^inspect_ai==' tests/exchange/viewers.txt)"
	@$(VIEWERS)/bin/pip install -qq --no-deps --ignore-requires-python "$$(grep '^harbor==' tests/exchange/viewers.txt)"
	@echo "viewers: installed into $(VIEWERS); pytest tests/exchange tests/browser uses them"

screenshots: install
	python -m screenshots

# The lock file constrains the extra's requirements. An interrupted run continues with what is missing; FRESH=1 measures again even
# if nothing has changed. `dvc repro` of the lifecycle is timed first, since it would wait for the surrounding `dvc repro`'s locks.
bench: install
	@python -c 'import mergekit, prefect_dask, prefect_ray, trl' 2> /dev/null \
		|| pip install -qq -c requirements.lock --no-build-isolation -e '.[bench]'
	python -m benchmarks $(if $(FRESH),--fresh,--only noop_repro noop_lifecycle)
	@echo "bench: dvc repro reports/benchmarks/dvc.yaml"
	dvc --wait-for-lock repro reports/benchmarks/dvc.yaml
	python -m benchmarks.documents

# Prints the cost first. Interrupted runs resume. BELLWETHER_JOBS=1 runs one arm and seed at a time.
CHOSEN = $(strip $(METHOD) $(if $(PROFILE),--profile '$(PROFILE)'))
claims: extras
	$(if $(PROFILE),@python -m flows.profile --model $(PROFILE))
	@python -m stages.claims --check $(CHOSEN)
	@echo "claims: dvc repro (finished experiments are skipped)"
	targets=$$(python -m stages.claims --targets $(CHOSEN)); \
		dvc --wait-for-lock repro $$targets $(if $(CHOSEN),,reports/claims/dvc.yaml:step_credit)
	python -m stages.reporting.documents

# Modules of the extra `control`.
CONTROL_NEEDS := gymnasium imageio minari mujoco nashpy pygame rliable shapiq stable_baselines3
control: install
	@python -c 'import sys; from importlib.util import find_spec as has; sys.exit(not all(map(has, sys.argv[1:])))' $(CONTROL_NEEDS) \
		|| pip install -qq -c requirements.lock --no-build-isolation -e '.[control]'
	$(if $(METHOD),python -m stages.control run $(METHOD),dvc --wait-for-lock repro reports/control/dvc.yaml)

# After changing dependencies in pyproject.toml and installing them into a fresh .venv.
lock:
	pip list --format=freeze --exclude-editable | grep -iv '^pip==' | sed 's/+.*//; /^sandlock==/s/$$/; sys_platform == "linux"/' | LC_ALL=C sort -f > requirements.lock

clean:
	rm -rf .bellwether/checkpoints .prefect .pytest_cache .ruff_cache .mypy_cache .hypothesis build
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
