"""Kernels compiled for a GPU where there is none: Triton brings its own assembler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    int: "i32",
    float: "fp32",
}
"""What Triton calls the types of arguments."""


class Launches:
    """Stands in the place of a kernel, and notes for what kinds of arguments Triton
    would compile it.
    """

    def __init__(self, kernel: Any, forms: set[Any]) -> None:
        self._kernel = kernel
        self._forms = forms

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
            form = tuple(self._form(p, given[p.name]) for p in self._kernel.params)
            self._forms.add((form, kwargs.get("num_warps", 4)))

        return launch

    def _form(self, parameter: Any, value: Any) -> Any:
        """Return the type of an argument, and what else a kernel is compiled for."""
        if parameter.is_constexpr:
            return "constexpr", value
        if isinstance(value, torch.Tensor):
            return (
                TYPES[value.dtype],
                parameter.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0,
            )
        special = (value == 1, isinstance(value, int) and value % 16 == 0)
        return TYPES[type(value)], parameter.do_not_specialize or special


def forms(patch: Any, *modules: Any) -> dict[str, set[Any]]:
    """Have the kernels of some modules noted instead of launched, as long as a
    `pytest.MonkeyPatch` lasts; return for what and for how many warps each was, by
    name.
    """
    noted: dict[str, set[Any]] = defaultdict(set)
    for module in modules:
        for name, kernel in vars(module).copy().items():
            if isinstance(kernel, triton.runtime.JITFunction):
                patch.setattr(module, name, Launches(kernel, noted[name]))
    return noted


def compiled(
    noted: dict[str, set[Any]], capability: int, *modules: Any
) -> Iterator[Any]:
    """Compile kernels for all that was noted."""
    target = GPUTarget("cuda", capability, 32)
    for name, kinds in noted.items():
        kernel = next(
            getattr(module, name) for module in modules if hasattr(module, name)
        )
        for form, warps in kinds:
            signature = {
                argument: kind
                for argument, (kind, _) in zip(kernel.arg_names, form, strict=True)
            }
            constants = {
                (i,): value
                for i, (kind, value) in enumerate(form)
                if kind == "constexpr"
            }
            yield triton.compile(
                ASTSource(kernel, signature, constants),
                target=target,
                options={"num_warps": warps},
            )
