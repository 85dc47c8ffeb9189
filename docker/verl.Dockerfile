# veRL with das-adapter, from a checkout: docker build -f docker/verl.Dockerfile -t verl-das .
# The base is an image of veRL's with vLLM 0.24 and no veRL in it; any image with Python 3.11 or newer, vLLM 0.24 or newer and a
# C++ compiler will do.
ARG BASE=verlai/verl:vllm024.dev2
FROM ${BASE}

ARG VERL=0.9.1
COPY . /opt/das-adapter
# What the base has of their requirements stays as it is: neither veRL nor das-adapter may replace its torch or vLLM.
RUN python3 -m pip install --no-cache-dir "verl==${VERL}" --no-deps \
    && python3 -m pip install --no-cache-dir /opt/das-adapter \
    && das-adapter doctor

# Run it with room in shared memory, for Ray and for the history: docker run --gpus all --shm-size 128g verl-das …
