"""What an engine without a host does: it harvests its own trajectories, and asks the writer of its node's history for
a generation."""
