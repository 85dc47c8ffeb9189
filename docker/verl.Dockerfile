# veRL with das-adapter, from a checkout: docker build -f docker/verl.Dockerfile -t verl-das .
# The base is an image of veRL's with vLLM 0.24 and no veRL in it, on which engines run vLLM's V1 runner with synchronous scheduling. Better is an
# image of yours with vLLM 0.31.0 (--build-arg BASE=…), whose V2 runner das-adapter takes: torch 2.13, transformers 5.10.4, flash-attn for
# this torch, what else veRL's training needs (docs/verl.md says what fits), Python 3.11 or newer and a C++ compiler.
ARG BASE=verlai/verl:vllm024.dev2@sha256:b867883b0dd011363e69ab2ab344922a28c5bd0409e2a324e3ee70fb27ca7543
FROM ${BASE}

ARG VERL=0.9.1
COPY . /opt/das-adapter
# What the base has of their requirements stays as it is: neither veRL nor das-adapter may replace its torch or vLLM.
RUN python3 -m pip install --no-cache-dir "verl==${VERL}" --no-deps \
    && python3 -m pip install --no-cache-dir /opt/das-adapter \
    && das-adapter doctor

# Run it with room in shared memory, for Ray and for the history: docker run --gpus all --shm-size 128g verl-das …
