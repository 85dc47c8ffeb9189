# NeMo-RL with das-adapter, from a checkout: docker build -f docker/nemo_rl.Dockerfile -t nemo-rl-das .
# The base is an image of NeMo-RL's from 0.8.0 on, with uv, a C++ compiler, the driver's environment in /opt/nemo_rl_venv and one
# environment for each class of Ray actors in /opt/ray_venvs.
ARG BASE=nvcr.io/nvidia/nemo-rl:v0.8.0
FROM ${BASE}

COPY . /opt/das-adapter
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Built once, with the driver's Python; installed wherever a class of das-adapter may arrive: in the driver's environment, the vLLM
# workers', and those of actors that are handed the generation, AsyncTrajectoryCollector among them.
RUN uv build --wheel --python /opt/nemo_rl_venv/bin/python --out-dir /tmp/dist /opt/das-adapter \
    && for python in /opt/nemo_rl_venv/bin/python /opt/ray_venvs/*/bin/python; do \
        uv pip install --no-cache --python "${python}" /tmp/dist/das_adapter-*.whl; \
    done \
    && rm -r /tmp/dist \
    && /opt/ray_venvs/nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker/bin/das-adapter doctor

# Run it with room in shared memory, for Ray and for the history: docker run --gpus all --shm-size 128g nemo-rl-das …
