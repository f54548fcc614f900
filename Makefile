# Two commands on a bare machine: `make serve` and `make test`. Needs python3 with venv and pip; `make djl` needs a JDK
# and Maven too, or DJL Serving.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8080
MODEL  ?= demo
OPTIONS ?=
# Test files at once. A file stays on one worker, which starts the servers that its tests share. The order is that of
# tests/conftest.py.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
BIN     = $(VENV)/bin
# uv comes from PyPI; UV_DEFAULT_INDEX names a mirror.
INSTALL = $(BIN)/uv pip install --quiet --python

# Tests start hundreds of processes: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# The port of `make serve` alone: `lmi` reads PORT too, as a variable of TGI's without effect.
unexport PORT

.DEFAULT_GOAL = install
.PHONY: help install dev serve djl test test-process test-model test-deploy test-fuzz test-attacks test-docs test-tools test-joints test-templates test-trtllm test-dynamo test-uvicorn test-python test-djl test-browser test-clients environments accept-vllm accept-trtllm accept-aws image-check lint format dist bench clean

help: ## the targets, and how long tests usually take on two cores once they are installed
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: $(VENV)/.installed ## what serving needs
dev: $(VENV)/.dev ## what tests and linters need too

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "lmi-handler needs Python 3.10 to 3.13, this is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet 'uv<1'

$(VENV)/.installed: pyproject.toml | $(BIN)/uv
	@echo "installing into $(VENV) (0.5 GB, about half a minute) ..."
	$(INSTALL) $(BIN)/python --compile-bytecode --editable '.[cpu,deploy]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/uv
	@echo "installing what tests and linters need too into $(VENV) (1.1 GB, about half a minute) ..."
	$(INSTALL) $(BIN)/python --compile-bytecode --editable '.[cpu,dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.browser: $(VENV)/.dev
	$(INSTALL) $(BIN)/python --editable '.[cpu,dev,browser]'
	@touch $@

$(VENV)/.djl: $(VENV)/.installed
	@echo "installing what DJL's Python worker imports ..."
	$(INSTALL) $(BIN)/python --editable '.[cpu,deploy,djl]'
	@touch $@

$(VENV)-docs/.installed: pyproject.toml | $(BIN)/uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-docs
	$(INSTALL) $(VENV)-docs/bin/python --requirements pyproject.toml --extra docs
	@touch $@

# All that tests need, on another Python: $(VENV)-3.10/.dev, say. It is on PATH, or pyenv has it.
$(VENV)-%/.dev: pyproject.toml | $(BIN)/uv
	@echo "installing what tests need into $(VENV)-$* ..."
	python=$$(python$* -c 'import sys; print(sys.executable)' 2>/dev/null || echo "$$(pyenv prefix $*)/bin/python") && \
		$(BIN)/uv venv --quiet --clear --seed --python "$$python" $(VENV)-$*
	$(INSTALL) $(VENV)-$*/bin/python --editable '.[cpu,dev]'
	@touch $@

serve: install ## the demo model, or MODEL=... PORT=... OPTIONS='-o ...'
	exec $(BIN)/lmi serve "$(MODEL)" --port $(PORT) $(OPTIONS)

# Under DJL Serving (DJL_SERVING_HOME, else djl-serving on PATH), else under its Python engine from Maven Central.
djl: $(VENV)/.djl ## the same under DJL; needs a JDK and Maven
	exec $(BIN)/python -m tests.djl "$(MODEL)" --port $(PORT) $(OPTIONS)

# -- tests: `make help` lists them ------------------------------------------------------------------------------------

PYTEST = $(BIN)/pytest $(PARALLEL)
# Neither a language model nor an environment of its own.
QUICK = -m 'not model and not clients and not djl and not vllm'

test: PARALLEL = -n 4 --dist loadfile --no-loadscope-reorder  # its tests wait more than they compute
test: dev ## 3 min, as pytest alone: units, the app, `lmi deploy` without AWS, one request a dialect on the demo model
	$(PYTEST)

test-process: PARALLEL = -n 4 --dist loadfile --no-loadscope-reorder
test-process: dev ## 1 min: servers and engines as processes of their own: signals, downloads, other ASGI servers
	$(PYTEST) $(QUICK) tests/process

test-model: dev ## 4 min: the demo model on OpenVINO; the wheel and the source distribution, installed as a user would
	$(PYTEST) --timeout 300 -m 'model and not clients and not djl and not vllm and not hypothesis' \
		tests/unit tests/app tests/process tests/model tests/deploy tests/examples tests/accept

test-deploy: dev ## 1 min: `lmi deploy` on doubles of AWS's control plane and SageMaker's runtime, on loopback
	$(PYTEST) $(QUICK) tests/deploy --ignore tests/deploy/unit

# What of it needs no server is in `make test`.
test-docs: PARALLEL = -n 2  # each page is a test of its own
test-docs: dev ## 2 min: every code block of the documents, run on real servers; its output is compared
	$(PYTEST) -m model tests/docs

test-fuzz: dev ## 3 min: request bodies and cuts of text at random, many of each; the CPU time that long answers take
	$(PYTEST) --timeout 300 -m 'hypothesis and not vllm' --hypothesis-profile many tests/unit tests/app tests/process
	$(PYTEST) --dist load tests/attacks/test_answers.py

test-attacks: PARALLEL = -n 0  # it measures waits: two files at once would measure one another
test-attacks: dev ## 3 min: what costs a server most, and the time that it costs; on a quiet machine
	$(PYTEST) --timeout 300 tests/attacks --ignore tests/attacks/test_answers.py

test-tools: dev ## 3 min: tests of the doubles, the benchmarks, `lmi replay`, `lmi conform`, the examples, the container's programs, conversion, the wheel; Prometheus (Debian's, by apt)
	$(PYTEST) $(QUICK) tests/doubles tests/bench tests/container tests/conversion tests/accept tests/djl tests/examples tests/monitoring tests/moving tests/tools

test-joints: dev ## 1 min: two halves that are each tested alone, joined: prompts and parsers, server and nginx or HAProxy (Debian's, by apt), files and encodings, log lines and advice
	$(PYTEST) tests/joints

test-trtllm: dev ## 3 min: TensorRT-LLM's double, and MPI workers under Open MPI 4 (of Debian, by apt as root) and 5 (of PyPI)
	$(PYTEST) tests/gpu/trtllm

# Its processes listen on all interfaces, so it gets a network of its own with nothing but loopback.
test-dynamo: dev ## 2 min: the engine openai in front of our own server, and of Dynamo with its KV router and workers
	$(BIN)/python -m tests.engines_by_url.environment $(VENV)-dynamo
	unshare --map-root-user --net sh -c 'ip link set lo up && exec $(BIN)/pytest -m "not vllm" tests/engines_by_url'

test-uvicorn: dev ## 1 min: the HTTP tests on the lowest and the newest uvicorn that pyproject.toml allows
	$(BIN)/python -m tests.accept.uvicorn_versions $(VENV)-uvicorn

test-python: test-python-3.10 test-python-3.13 ## 2 min: units on Python 3.10 and 3.13, and half of the app on each

# The two share the large folders. Neither has what no version of Python changes: texts and imports of our own, which
# `make test` reads, and the API's document. Engines' files and downloads, and replicas, run on the lowest one.
TEXTS = $(addprefix --ignore tests/unit/,test_structure.py test_messages.py test_makefile.py \
	config/test_options_document.py config/test_migrating_document.py protocols/test_wire_document.py)
SHARE-3.10 = --ignore tests/app/dialects
SHARE-3.13 = --ignore tests/unit/engines --ignore tests/app/test_replicas.py --ignore tests/app/serving \
	--ignore tests/app/http --ignore tests/app/security --ignore tests/app/media --ignore tests/app/dialects/test_openapi.py
test-python-%: $(VENV)-%/.dev
	$(VENV)-$*/bin/pytest $(PARALLEL) $(QUICK) tests/unit tests/app $(TEXTS) $(SHARE-$*) --hypothesis-profile fewest

test-djl: dev ## 8 min: under DJL's Java engine; needs a JDK and Maven
	$(PYTEST) -m 'djl and not vllm' tests/djl tests/container

test-templates: dev $(VENV)-templates/.fetched $(VENV)-templates/vllm.jsonl ## 3 min: tool calls in the chat templates of 60 models, of llama-cpp-python's source distribution; answers in vLLM's tests and messages in its source, of vLLM's
	$(PYTEST) tests/templates tests/joints/test_log_lines.py --templates $(VENV)-templates

# Nothing of it is installed; pip prepares its metadata.
LLAMA_CPP = 0.3.36
$(VENV)-templates/.fetched: | $(VENV)/.dev
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d $(VENV)-templates llama-cpp-python==$(LLAMA_CPP)
	tar -xzf $(VENV)-templates/llama_cpp_python-$(LLAMA_CPP).tar.gz -C $(VENV)-templates --strip-components 5 --wildcards '*/models/templates/*.jinja'
	@touch $@

# vLLM's parsers run once on its tests' answers; nothing of it is installed.
$(VENV)-templates/vllm.jsonl: tests/templates/vllm/fetch.py tests/templates/vllm/record.py | $(VENV)/.dev
	$(BIN)/python -m tests.templates.vllm.fetch $(VENV)-templates

test-browser: $(VENV)/.browser ## 3 min: the pages in a headless Chromium: the system's, or CHROMIUM=...
	$(BIN)/pytest tests/browser

test-clients: dev ## 4 min: real client libraries, AWS's CDK; those in JavaScript and Java need Node with npm, a JDK and Maven
	$(PYTEST) -m 'clients and not djl and not vllm' tests/clients tests/deploy tests/examples

environments: dev ## of test-clients, test-python and accept-vllm, installed before
	$(BIN)/python -m tests.clients
	$(MAKE) $(VENV)-3.10/.dev $(VENV)-3.13/.dev
	$(BIN)/python -m tests.accept.vllm_environment $(VENV)-vllm

# VLLM_PYTHON's, on a GPU say, else its CPU build in an environment of its own.
accept-vllm: $(if $(VLLM_PYTHON),,$(BIN)/uv) ## 10 min: the engines' suites on the real vLLM
	python=$$($(if $(VLLM_PYTHON),$(PYTHON),$(BIN)/python) -m tests.accept.vllm_environment $(VENV)-vllm) && \
		$$python -m tests.gpu.vllm.checkpoint && $$python -m pytest --timeout 300 -m vllm tests/gpu/vllm tests/process/engines tests/unit/engines tests/engines_by_url

# PYTHON is the one that has TensorRT-LLM, MODEL a Hugging Face directory (docs/trtllm.md).
accept-trtllm: ## on a GPU machine: the real TensorRT-LLM
	@test "$(origin MODEL)" != file || { echo 'make accept-trtllm MODEL=... : a Hugging Face directory or hub name' >&2; exit 2; }
	$(PYTHON) -m tests.accept.trtllm "$(MODEL)" $(OPTIONS)

# The images are built by buildah on bases of Debian's packages (docs/container.md). IMAGES=cpu leaves the others out, and what
# builds it again (again).
IMAGES ?= cpu again trtllm lmi
image-check: dev ## 5 min: the images, built and run by podman; needs root, installs what it uses by apt
	@for name in debootstrap buildah podman crun; do command -v $$name >/dev/null || missing=yes; done; test -z "$$missing" || { \
		apt-get -o DPkg::Lock::Timeout=300 update -q && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 \
		install -qy --no-install-recommends buildah podman debootstrap crun conmon; }
	$(BIN)/python -m tests.container.images.check $(IMAGES)

# LMI_ACCEPT_AWS=yes allows it; SPEC is a deployment's file, OPTIONS as `--set name=...`.
accept-aws: dev ## in a real AWS account, where it costs money: up, invoke, scale, update, down (docs/deploy.md)
	@test -n "$(SPEC)" || { echo 'LMI_ACCEPT_AWS=yes make accept-aws SPEC=FILE' >&2; exit 2; }
	$(BIN)/python -m tests.accept.aws "$(SPEC)" $(OPTIONS)

lint: dev ## 1 min: format, rules, types, spelling, the Dockerfile
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/hadolint Dockerfile

format: dev ## what lint would have
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: docs
docs: $(VENV)-docs/.installed ## 10 s: the documents as a site with search, in build/site: open index.html there by a web server
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs build --strict --clean

# Of the source distribution, so that both hold the same.
dist: $(BIN)/uv ## 5 s: the source distribution and the wheel, in dist/
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist

bench: dev ## 7 min: the load generator on the demo model, and the host's CPU
	$(BIN)/python bench/run.py

clean:
	rm -rf $(VENV) $(VENV)-templates $(VENV)-dynamo $(VENV)-vllm $(VENV)-uvicorn $(VENV)-docs $(VENV)-3.10 $(VENV)-3.13 .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
