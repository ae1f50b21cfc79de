# make serve   a chat server on http://127.0.0.1:8080 with the default model      make test   everything that is checked
# make lab     the chapters in JupyterLab     make docs   the site, in _proc/_site     make bench   measure this machine again
SHELL := /bin/bash
MODEL ?= smollm2
PORT ?= 8080
JOBS ?= 2
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
FACTS := settings.ini setup.py pyproject.toml
NB := $(PY) tools/nbexec.py

.PHONY: serve test models test-py notebooks lint docs lab bench export clean
.NOTPARALLEL:

serve: $(VENV)/.installed
	$(BIN)/literate-engine pull $(MODEL)
	$(BIN)/literate-engine serve $(MODEL) --host 127.0.0.1 --port $(PORT)

# pytest is last, so that its closing line is the last word; every part runs and all must pass
test: $(VENV)/.dev
	@failed=; for part in models lint docs notebooks test-py; do echo "== $$part"; $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

# the chapters and tests that show real text need these; what cannot be fetched is said once here
models: $(VENV)/.dev
	@for m in smollm2 gemma3-270m; do $(BIN)/literate-engine pull $$m || echo "without $$m some outputs differ and some tests are skipped"; done

test-py: $(VENV)/.dev
	$(PY) -m pytest -q -rs --durations=5

notebooks: $(VENV)/.dev
	$(NB) --check -j $(JOBS)

lint: $(VENV)/.dev
	$(PY) -m ruff check .

docs: $(VENV)/.dev
	$(PY) tools/sidebar.py --check
	$(PY) tools/nbfilter.py . _proc
	cd _proc && PATH="$(CURDIR)/$(BIN):$$PATH" DOCS_VENDOR=$${DOCS_VENDOR:-../node_modules} ../$(BIN)/smalldocs render --strict .

lab: $(VENV)/.dev
	$(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) nbs

# the cells marked `bench` of every chapter, then the end-to-end comparison with llama.cpp
bench: models
	NB_FLAGS=bench $(NB) -j 1
	$(BIN)/literate-engine bench decode $(MODEL) --peer llama.cpp
	$(BIN)/literate-engine bench prefill $(MODEL) --peer llama.cpp

export: $(VENV)/.dev
	$(BIN)/nbdev_export

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(FACTS) | $(VENV)/.made
	$(PY) -m pip install -q -e .
	@touch $@

$(VENV)/.dev: $(FACTS) | $(VENV)/.made
	$(PY) -m pip install -q -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf _proc _site build dist *.egg-info .pytest_cache .ruff_cache literate_engine/__pycache__
