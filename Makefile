# Two commands on a bare machine: `make serve` and `make test`. Needs python3 with venv and pip; `make djl` needs a JDK
# and Maven too, or DJL Serving.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8080
MODEL  ?= demo
OPTIONS ?=
# Test files at once. A file stays on one worker, which starts the servers that its tests share.
PARALLEL ?= -n 2 --dist loadfile
BIN     = $(VENV)/bin
# uv from PyPI; a mirror of PyPI is UV_DEFAULT_INDEX. Bytecode is compiled at installation, as pip does it.
INSTALL = $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python

# Tests start hundreds of processes: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install dev serve djl test test-deploy test-clients test-uvicorn test-trtllm test-djl test-browser environments accept-vllm accept-trtllm accept-aws image-check lint format bench clean

install: $(VENV)/.installed
dev: $(VENV)/.dev

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "lmi-handler needs Python 3.10 to 3.13, this is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet 'uv<1'

$(VENV)/.installed: pyproject.toml | $(BIN)/uv
	@echo "installing into $(VENV) (0.4 GB, about half a minute) ..."
	$(INSTALL) --editable '.[cpu,deploy]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/uv
	@echo "installing what tests and linters need too into $(VENV) (1.1 GB, about half a minute) ..."
	$(INSTALL) --editable '.[cpu,dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.browser: $(VENV)/.dev
	$(INSTALL) --editable '.[cpu,dev,browser]'
	@touch $@

$(VENV)/.djl: $(VENV)/.installed
	@echo "installing what DJL's Python worker imports ..."
	$(INSTALL) --editable '.[cpu,deploy,djl]'
	@touch $@

# All that tests need, on another Python: $(VENV)-3.10/.dev, say. It is on PATH, or pyenv has it.
$(VENV)-%/.dev: pyproject.toml | $(BIN)/uv
	@echo "installing what tests need into $(VENV)-$* ..."
	python=$$(python$* -c 'import sys; print(sys.executable)' 2>/dev/null || echo "$$(pyenv prefix $*)/bin/python") && \
		$(BIN)/uv venv --quiet --clear --python "$$python" $(VENV)-$*
	$(INSTALL) --python $(VENV)-$*/bin/python --editable '.[cpu,dev]'
	@touch $@

serve: install
	exec $(BIN)/lmi serve "$(MODEL)" --port $(PORT) $(OPTIONS)

# Under DJL Serving (DJL_SERVING_HOME, else djl-serving on PATH), else under its Python engine from Maven Central.
djl: $(VENV)/.djl
	exec $(BIN)/python -m tests.djl "$(MODEL)" --port $(PORT) $(OPTIONS)

test: dev
	$(BIN)/pytest $(PARALLEL) -m 'not clients and not djl and not vllm and not browser and not trtllm' --ignore=tests/deploy

# `lmi deploy`: AWS's control plane and SageMaker's runtime are doubles on loopback.
test-deploy: dev
	$(BIN)/pytest $(PARALLEL) -m 'not clients and not djl and not vllm' tests/deploy

# What TensorRT-LLM needs of the system, without it and without a GPU: MPI workers under Open MPI 4 (Debian's, installed
# where there is none, which needs root) and 5 (from PyPI), and a minute of streams.
test-trtllm: dev
	$(BIN)/pytest $(PARALLEL) -m trtllm tests/process/trtllm

# Real client libraries, each in an environment of its own; those in JavaScript and Java need Node with npm, a JDK and Maven.
# Java's own HttpClient, and curl.
test-clients: dev
	$(BIN)/pytest $(PARALLEL) -m 'clients and not djl and not vllm'

# What we subclass of uvicorn, on the lowest and the newest version that pyproject.toml allows; about two minutes.
test-uvicorn: dev
	$(BIN)/python -m tests.accept.uvicorn_versions $(VENV)-uvicorn

# What runs under DJL; needs a JDK and Maven.
test-djl: dev
	$(BIN)/pytest $(PARALLEL) -m 'djl and not vllm'

# The pages, in a headless Chromium: the system's, or CHROMIUM=...
test-browser: $(VENV)/.browser
	$(BIN)/pytest tests/browser

# The environments of test-clients, test-python and accept-vllm, which each would otherwise install for itself.
environments: dev
	$(BIN)/python -m tests.clients
	$(MAKE) $(VENV)-3.10/.dev $(VENV)-3.13/.dev
	$(BIN)/python -m tests.accept.vllm_environment $(VENV)-vllm

# The same suites on the real vLLM: VLLM_PYTHON's, on a GPU say, else its CPU build in an environment of its own.
accept-vllm: $(if $(VLLM_PYTHON),,$(BIN)/uv)
	python=$$($(if $(VLLM_PYTHON),$(PYTHON),$(BIN)/python) -m tests.accept.vllm_environment $(VENV)-vllm) && $$python -m pytest --timeout 300 -m vllm tests/gpu tests/process/engines tests/unit/engines

# On a GPU machine: PYTHON is the one that has TensorRT-LLM, MODEL a Hugging Face directory (docs/trtllm.md).
accept-trtllm:
	@test "$(origin MODEL)" != file || { echo 'make accept-trtllm MODEL=... : a Hugging Face directory or hub name' >&2; exit 2; }
	$(PYTHON) -m tests.accept.trtllm "$(MODEL)" $(OPTIONS)

# The images, built by buildah on bases made of Debian's packages, and run by podman (docs/container.md). Needs root;
# installs what it uses by apt. IMAGES=cpu leaves the others out.
IMAGES ?= cpu trtllm lmi
image-check: dev
	@for name in debootstrap buildah podman crun; do command -v $$name >/dev/null || missing=yes; done; test -z "$$missing" || { \
		apt-get -o DPkg::Lock::Timeout=300 update -q && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 \
		install -qy --no-install-recommends buildah podman debootstrap crun conmon; }
	$(BIN)/python -m tests.container.images.check $(IMAGES)

# In a real AWS account, where it costs money: up, invoke, stream, scale, update, down, and a verdict (docs/deploy.md).
# LMI_ACCEPT_AWS=yes allows it; SPEC is a deployment's file, OPTIONS as `--set name=...`.
accept-aws: dev
	@test -n "$(SPEC)" || { echo 'LMI_ACCEPT_AWS=yes make accept-aws SPEC=FILE' >&2; exit 2; }
	$(BIN)/python -m tests.accept.aws "$(SPEC)" $(OPTIONS)

lint: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: dev
	$(BIN)/python bench/run.py

clean:
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-uvicorn $(VENV)-3.10 $(VENV)-3.13 .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
