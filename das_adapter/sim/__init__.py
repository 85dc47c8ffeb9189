"""Simulate rollouts: what they would take on given hardware, with and without drafts.

`Simulation` runs the arms of a `SimConfig`; `das-adapter simulate` reads one from YAML.
The policy of drafts, routing, history and latency models are the package's own; only
engines and clocks are models.
"""

from das_adapter.sim.config import SimConfig
from das_adapter.sim.simulate import Simulation, simulate, summary

__all__ = ["SimConfig", "Simulation", "simulate", "summary"]
