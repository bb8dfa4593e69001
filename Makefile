# The two commands a user needs are `make serve` and `make test`; each builds its own virtualenv.
# PYTHON=python3.13 names the Python that makes it; without that one that exists is kept.
ifeq ($(origin PYTHON),undefined)
PYTHON := python3
else
ASKED := --this-python
endif
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=

# macOS has one MLX; on Linux a machine with an NVIDIA driver takes the CUDA build.
ifeq ($(shell uname -s),Darwin)
EXTRAS ?=
else ifneq ($(wildcard /proc/driver/nvidia/version),)
EXTRAS ?= cuda
else
EXTRAS ?= cpu
endif
comma := ,
DEV   := dev$(if $(EXTRAS),$(comma)$(EXTRAS))

# Only versions that were tested together are installed, build tools included.
TESTED  := constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
           --constraint $(TESTED) --build-constraint $(TESTED)

.PHONY: serve test test-clients check bench upgrade clean FORCE

serve: $(VENV)/.serve
	$(BIN)/paceline serve $(ARGS)

# Each file on one of up to four processes, since a process loads the model for itself
test: check
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile \
		--no-loadscope-reorder $(ARGS)

# Real clients from their own registries (needs npm as well); each lands in .clients/
test-clients: $(VENV)/.dev
	$(BIN)/python -m tests.clients $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/paceline bench $(ARGS)

# Move constraints.txt to the newest versions that pyproject.toml allows, on every Python here
upgrade: $(VENV)/.made
	$(BIN)/python .ci/upgrade.py $(PYTHONS)

clean:
	rm -rf $(VENV) .clients build src/*.egg-info

# Touched only when it had to be made, or made anew
$(VENV)/.made: FORCE
	@$(PYTHON) .ci/venv.py $(VENV) $(TESTED) $(ASKED)

$(VENV)/.serve: $(VENV)/.made pyproject.toml $(TESTED)
	$(INSTALL) --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
	touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml $(TESTED)
	$(INSTALL) --editable '.[$(DEV)]'
	touch $@ $(VENV)/.serve
