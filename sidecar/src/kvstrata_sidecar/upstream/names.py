"""Compares the names that a version's modules need with the installed packages.

A need is one string:

    package.module:Name                       exists, as do Name.attribute and functions
    package.module:Name.method(first, second) has exactly these parameters
    package.module:Name{first, second}        is a dataclass, or an abstract class, with exactly these fields or methods
    package.module:Name#attribute             sets this attribute on itself in `__init__`, or is a dataclass with it
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

_NEED = re.compile(
    r"(?P<module>[\w.]+):(?P<name>[\w.]+)(?:\((?P<params>.*)\)|\{(?P<members>.*)\}|#(?P<attribute>\w+))?"
)


def differences(needs: Iterable[str]) -> list[str]:
    """Return a sentence for each need that the installed packages do not meet. Raises ValueError for a bad need."""
    return [found for need in needs if (found := _difference(need))]


def _difference(need: str) -> str:
    parsed = _NEED.fullmatch(need)
    if parsed is None:
        raise ValueError(f"{need!r} is not a need")
    module, name = parsed["module"], parsed["name"]
    try:
        found = attrgetter(name)(importlib.import_module(module))
    except ImportError as error:
        return f"{module} cannot be imported ({error})"
    except AttributeError:
        return f"{module} has no {name}"
    if (params := parsed["params"]) is not None:
        return _changed(f"{module}:{name}", "parameters", _split(params), _parameters(found))
    if (members := parsed["members"]) is not None:
        return _changed(f"{module}:{name}", "members", sorted(_split(members)), sorted(_members(found)))
    if (attribute := parsed["attribute"]) is not None and attribute not in {*_set_in_init(found), *_members(found)}:
        return f"{module}:{name} sets no {attribute}"
    return ""


def _changed(place: str, kind: str, wanted: list[str], found: list[str]) -> str:
    return "" if wanted == found else f"{place} has the {kind} ({', '.join(found)}), not ({', '.join(wanted)})"


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _parameters(function: Any) -> list[str]:
    """Return the parameters' names without `self`, also behind a decorator without `functools.wraps`."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    if names == ["args", "kwargs"]:
        cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
        decorated = next((content for content in cells if inspect.isfunction(content)), None)
        return names if decorated is None else _parameters(decorated)
    return names


def _members(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "__abstractmethods__", ()))


def _set_in_init(kind: type) -> frozenset[str]:
    """Return the names that the initializers of a class and its bases use as attributes."""
    initializers = (vars(base).get("__init__") for base in kind.__mro__)
    codes = (getattr(inspect.unwrap(one), "__code__", None) for one in initializers if one is not None)
    return frozenset(name for code in codes if code is not None for name in code.co_names)
