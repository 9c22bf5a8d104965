PYTHON ?= python3
VENV   := .venv
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
USE    := retrieval,clustering,language,serving,embedded,peers
WORK   := $(USE),dask,ray,test,browser,lint,docs
PINS   := pyproject.toml constraints.txt requirements-data.txt
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-browser lint format docs benchmarks clean

help:                ## Show what there is to make.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

demo: $(VENV)/use    ## Check both embedded methods at quick scale; prints the verdicts, writes report.html.
	env -u OMP_NUM_THREADS $(VENV)/bin/practicum check lemur lmbc --scale quick --html report.html

test: $(VENV)/work   ## Run the whole test suite, doctests included.
	$(VENV)/bin/python -m pytest -m "not browser" -n 2 --dist worksteal

test-browser: $(VENV)/work ## Run the tests of the report in headless Chromium (Debian: apt-get install chromium).
	$(VENV)/bin/python -m pytest -m browser tests/browser

lint: $(VENV)/work   ## Check style, types and who imports whom.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

format: $(VENV)/work ## Put the code in order.
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/work   ## Build the site into site/, in strict mode.
	$(VENV)/bin/mkdocs build --strict

clean:               ## Remove the environment and all that was built.
	rm -rf $(VENV) site dist build

$(VENV)/use: $(PINS)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -e '.[$(USE)]'
	$(PIP) --no-deps -r requirements-data.txt
	touch $@

$(VENV)/work: $(VENV)/use
	$(PIP) -e '.[$(WORK)]'
	touch $@
