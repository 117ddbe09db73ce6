"""Docstrings of fields, for CRDs and the reference.

With pydantic's own option every import of a model would read them from the source, which takes a tenth of the
operator's start and serves no purpose there.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise


@cache
def field_docstrings(model: type) -> Mapping[str, str]:
    """Return the docstring of each field that has one, by the field's name in Python; inherited ones included."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if "__annotations__" in vars(cls) and cls.__module__.split(".")[0] != "pydantic":
            found |= _own(cls)
    return found


def _own(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}  # a class without a source file, made by a test
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
