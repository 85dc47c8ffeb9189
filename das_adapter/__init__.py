"""Lossless speculative rollouts from the run's own history, for veRL, NeMo-RL and every
trainer that runs vLLM.
"""

from das_adapter import logs

__version__ = "0.2.0"

logs.set_up()
