# The two commands a user needs are `make serve` and `make test`; each builds its own virtualenv.
PYTHON ?= python3
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

.PHONY: serve test test-clients check bench clean

serve: $(VENV)/.serve
	$(BIN)/paceline serve $(ARGS)

test: check
	$(BIN)/python -m pytest $(ARGS)

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

clean:
	rm -rf $(VENV) .clients build src/*.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[$(DEV)]'
	touch $@ $(VENV)/.serve
