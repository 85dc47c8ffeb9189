"""The labels of a NeMo-RL generation batch. NeMo-RL gives its generation only token ids, so the first turn's prompt
is a problem's identity (`protocol.label.Labeller`)."""

LABELS = "das_labels"
"""Key of a NeMo-RL generation batch: the `Label` of each row."""
