# NeMo-RL with das-adapter, from a checkout: docker build -f docker/nemo_rl.Dockerfile -t nemo-rl-das .
# The base is an image of NeMo-RL's from 0.8.0 on (its release notes name it), with uv, a C++ compiler, the driver's environment in /opt/nemo_rl_venv and one
# environment for each class of Ray actors in /opt/ray_venvs. Name its digest, too, for an image that can be built again:
# --build-arg BASE=nvcr.io/nvidia/nemo-rl:v0.8.0@sha256:… (docker buildx imagetools inspect says it).
ARG BASE=nvcr.io/nvidia/nemo-rl:v0.8.0
FROM ${BASE}

COPY . /opt/das-adapter
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Built once, and installed wherever a class of das-adapter may arrive: in the driver's environment, the vLLM workers', and those of actors
# that are handed the generation.
RUN uv build --wheel --python /opt/nemo_rl_venv/bin/python --out-dir /opt/das-adapter/dist /opt/das-adapter \
    && uv pip install --no-cache --python /opt/nemo_rl_venv/bin/python /opt/das-adapter/dist/das_adapter-*.whl \
    && /opt/nemo_rl_venv/bin/das-adapter install nemo-rl --venvs /opt/ray_venvs --from /opt/das-adapter/dist/das_adapter-*.whl \
    && /opt/ray_venvs/nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker/bin/das-adapter doctor

# Run it with room in shared memory, for Ray and for the history: docker run --gpus all --shm-size 128g nemo-rl-das …
