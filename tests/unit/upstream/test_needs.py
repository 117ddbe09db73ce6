"""The needs of a version list every name of LMCache's and vLLM's objects that the package `upstream` uses."""

from __future__ import annotations

import ast
import collections
import ctypes
import dataclasses
import importlib.metadata
import inspect
import logging
import multiprocessing
import os
import queue
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvstrata_sidecar.upstream.v0_5_6 import needs

SIDECAR = Path(needs.__file__).parents[2]
PRODUCT = (SIDECAR, Path(inspect.getfile(importlib.import_module("kvstrata.contract"))).parent)

PYTHON = frozenset(
    name
    for owner in (
        *(bytes, dict, float, int, list, memoryview, set, str, tuple, type, Path),
        *(collections.Counter, collections.deque, queue.Queue, threading.Condition, threading.Event),
        *(ctypes, dataclasses, importlib, importlib.metadata, inspect, logging, logging.Logger, multiprocessing, os),
        *(re, threading, threading.Lock(), threading.Thread, time, (lambda: 0).__code__),
    )
    for name in dir(owner)
) | {"__closure__", "__code__", "cell_contents", "__abstractmethods__", "pid"}

OF_OTHERS = {
    "_sdk_config": "OpenTelemetry: without it the gate leaves out lines with salts",
    "get_meter_provider": "OpenTelemetry",
    "auto_map": "Hugging Face: a key of a model's configuration",
    "kv_cache_layout": "vLLM: a fact of the fingerprint where it exists",
    "engine_client": "vLLM: the state of its API server, which has no class; without it there is no reset",
}


def used(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes that are read, by a dot or by `getattr` and `hasattr`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield name


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def trees(folder: Path) -> Iterator[tuple[Path, ast.AST]]:
    for path in folder.rglob("*.py"):
        if path.name != "needs.py":
            yield path, ast.parse(path.read_text())


def test_every_name_that_is_used_is_a_need_or_ours() -> None:
    listed = set(re.findall(r"\w+", " ".join((*needs.SERVER, *needs.CONNECTOR, *needs.RESET))))
    ours = {name for folder in PRODUCT for _, tree in trees(folder) for name in defined(tree)}
    missing = {
        f"{path.name}: {name}"
        for path, tree in trees(SIDECAR / "upstream")
        for name in used(tree)
        if name not in listed | ours | PYTHON | OF_OTHERS.keys()
    }
    assert not missing
