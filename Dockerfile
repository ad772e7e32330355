# raypar, torch and Ray, for containers and for the pods of KubeRay.
#
#   docker build -t raypar:0.1.0 .                                  on CPUs
#   docker build -t raypar:0.1.0-cuda --build-arg TORCH=cuda .      for NVIDIA GPUs: torch ships CUDA, the host a driver
#   docker run --rm -it --cpuset-cpus 0-3 --shm-size 2g -v "$PWD:/work" raypar:0.1.0 raypar study batch_size.py
#
# Any Python from 3.11 on will do. The machine that submits needs the same Python and Ray.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# git for `raypar ab`; older operators of KubeRay probe Ray with wget (newer ones over HTTP).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git wget \
    && rm -rf /var/lib/apt/lists/*

# The group may write to the volumes of `raypar cluster kubernetes`, which names it (fsGroup).
RUN useradd --create-home --uid 1000 --user-group raypar \
    && install -d -o 1000 -g 1000 /opt/venv /opt/raypar /work
USER 1000
ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    RAY_USAGE_STATS_ENABLED=0
RUN python -m venv /opt/venv

# torch first, in a layer that changes with it alone: CPU wheels (0.2 GB) or CUDA ones (5 GB), both from one index.
ARG TORCH=cpu
# hadolint ignore=DL3013
RUN case "$TORCH" in \
        cpu) set -- --index-url https://download.pytorch.org/whl/cpu ;; \
        cuda) set -- ;; \
        *) echo "TORCH=$TORCH: write cpu or cuda" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir "$@" 'torch>=2.13,<3' 'torchvision>=0.28,<1'

# The dependencies of an empty raypar, in a layer that changes with pyproject.toml alone; then raypar itself.
WORKDIR /opt/raypar
COPY --chown=1000:1000 pyproject.toml README.md LICENSE ./
# hadolint ignore=DL3013
RUN mkdir raypar && touch raypar/__init__.py \
    && pip install --no-cache-dir '.[train,search,cluster]' \
    && pip uninstall --yes raypar
COPY --chown=1000:1000 raypar raypar
RUN pip install --no-cache-dir --no-deps .

WORKDIR /work
CMD ["raypar", "--help"]
