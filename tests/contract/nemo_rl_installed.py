"""Run NeMo-RL's own tests with das-adapter installed into NeMo-RL: a pytest plugin.

python -m pytest -p nemo_rl_installed --noconftest
<NeMo-RL>/tests/unit/models/generation/test_vllm_utils.py
"""

import das_adapter.cpu.nemo_rl_worker  # noqa: F401  before anything of NeMo-RL
from das_adapter.nemo_rl.install import install

install()
