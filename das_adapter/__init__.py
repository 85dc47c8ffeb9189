"""Lossless speculative rollouts for veRL and NeMo-RL, drafted from the run's own
history.
"""

__version__ = "0.2.0"
