"""The part that only a machine without an accelerator needs. The adapter reaches it
through the entry points `das_adapter.cpu` (`compat.for_cpu`), users through hidden
commands.
"""
