"""`make mutate`: change product lines one at a time, and see whether a test fails.

mutmut makes the mutants and runs, for each, the tests that reach its function. It works in a copy of the repository
below `.local/mutants`, never in the checkout. It changes code inside functions without decorators, and no constants.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mutmut.mutation.file_mutation import mutate_file_contents

REPOSITORY = Path(__file__).resolve().parents[1]
COPY, LOG = REPOSITORY / ".local/mutants/copy", REPOSITORY / ".local/mutants/log"
IN_COPY = re.compile("^(operator|sidecar)/src/")
OPERATOR, SIDECAR = "operator/src/kvstrata", "sidecar/src/kvstrata_sidecar"

PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "api": (f"{OPERATOR}/api", ("tests/unit/api", "tests/unit/plan")),
    "contract": (f"{OPERATOR}/contract", ("tests/unit/contract",)),
    "model": (f"{OPERATOR}/model", ("tests/unit/model", "tests/unit/plan")),
    "objects": (f"{OPERATOR}/objects", ("tests/unit/objects", "tests/unit/plan")),
    "plan": (f"{OPERATOR}/plan", ("tests/unit/plan",)),
    "clients": (f"{OPERATOR}/clients", ("tests/unit/clients",)),
    "reconcile": (f"{OPERATOR}/reconcile", ("tests/unit/reconcile",)),
    "cli": (f"{OPERATOR}/cli", ("tests/unit/cli",)),
    "gate": (f"{SIDECAR}/gate", ("tests/gate",)),
    "adapter": (f"{SIDECAR}/adapter", ("tests/adapter", "tests/tiers")),
    "memory": (f"{SIDECAR}/adapter/memory", ("tests/adapter/test_memory*.py",)),
    "files": (f"{SIDECAR}/adapter/files", ("tests/files",)),
    "connector": (f"{SIDECAR}/connector", ("tests/dataplane/test_guard_*.py",)),
    "upstream": (
        f"{SIDECAR}/upstream",
        ("tests/adapter/test_memory*.py", "tests/dataplane/test_guard_*.py", "tests/unit/upstream"),
    ),
    "delete_job": (
        f"{SIDECAR}/delete_job",
        ("tests/adapter/test_erase_pace.py", "tests/tiers/test_deletion_job.py", "tests/tiers/test_erase*.py"),
    ),
}
"""The folder of a part and its tests. A file belongs to the part with the innermost folder."""

FIXED_SETTINGS = {"process_isolation": "forkserver", "timeout_constant": "30", "timeout_multiplier": "4"}
FAST = "not apiserver and not lmcache and not cluster"
LOG_LINES = r"^\s*(self\.)?_?log\.\w+\("
PROSE = re.compile(r'f?"[^"]* [^"]*"|\bNone\b')
"""Text for people, or None in its place: tests need not repeat it."""

KILLED = ("killed", "timeout", "segfault", "suspicious", "check was interrupted by user")
"""The last is pytest's word for a module that cannot be imported."""


@dataclass(frozen=True)
class Mutant:
    """One change of one function: `name` is mutmut's, `line` where in the file `path` the change begins."""

    name: str
    path: str
    line: int
    change: tuple[str, ...]

    def is_prose(self) -> bool:
        old, new = ([PROSE.sub("", text[1:]) for text in self.change if text[0] == sign] for sign in "-+")
        return old == new and any('"' in text for text in self.change)


def part_of(path: str) -> str | None:
    holding = [name for name, (folder, _) in PARTS.items() if path.startswith(f"{folder}/")]
    return max(holding, key=lambda name: len(PARTS[name][0]), default=None)


def git(*arguments: str) -> str:
    """Return the output of git, or nothing where it fails."""
    return subprocess.run(["git", *arguments], check=False, capture_output=True, text=True).stdout.strip()


def changed_lines(since: str) -> dict[str, Collection[int]]:
    """Return the lines of product files that differ from a revision."""
    lines: dict[str, Collection[int]] = {}
    path = ""
    for text in git("diff", "-U0", since, "--", OPERATOR, SIDECAR).splitlines():
        if text.startswith("+++ "):
            path = text[4:].removeprefix("b/")
        elif path.endswith(".py") and (hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", text)):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            lines[path] = {*lines.get(path, ()), *range(start, start + count)}
    return lines


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    mutated = mutate_file_contents(path, source)
    spans, code = mutated.line_span_by_function_name, mutated.code.splitlines()
    module = ".".join(PurePosixPath(path).with_suffix("").parts[2:]).removesuffix(".__init__")
    starts = _first_lines(ast.parse(source))
    for name in mutated.mutant_names:
        key = name.partition("__mutmut_")[0]
        function = re.sub("^(x_|.*ǁ)", "", key)
        old, new = (
            [text.replace(f"def {each}(", f"def {function}(") for text in code[spans[each].start - 1 : spans[each].end]]
            for each in (f"{key}__mutmut_orig", name)
        )
        first = next(at for at, text in enumerate(old) if f"def {function}(" in text)
        change = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
        line = starts[key] - first + int(re.findall(r"\d+", change[0])[0]) - 1
        yield Mutant(f"{module}.{name}", path, line, tuple(text for text in change if text[0] in "-+"))


def _first_lines(tree: ast.Module) -> dict[str, int]:
    """Return the line of each function's `def`, by mutmut's name for the function."""
    classes = [(f"xǁ{node.name}ǁ", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        f"{prefix}{node.name}": node.lineno
        for prefix, body in [("x_", tree.body), *classes]
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def copy_repository() -> None:
    """Copy the working tree below `.local`, with the product's packages in `src`, where mutmut looks for them."""
    shutil.rmtree(COPY, ignore_errors=True)
    for name in git("ls-files", "-co", "--exclude-standard").splitlines():
        for place in {name, IN_COPY.sub("src/", name)}:
            if (REPOSITORY / name).is_file():
                (COPY / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, COPY / place)
    (COPY / "mutants").mkdir()
    (COPY / "mutants/.local").symlink_to(REPOSITORY / ".local")


def configure(paths: Collection[str]) -> None:
    """Have mutmut change these modules, and run the tests of their parts."""
    patterns = [pattern for part in sorted({part_of(path) or "" for path in paths}) for pattern in PARTS[part][1]]
    tests = dict.fromkeys(str(path.relative_to(COPY)) for pattern in patterns for path in sorted(COPY.glob(pattern)))
    settings = {
        "source_paths": ["src"],
        "only_mutate": [IN_COPY.sub("src/", path) for path in paths],
        "also_copy": [path.name for path in COPY.iterdir() if path.is_dir() and path.name not in ("src", "mutants")],
        "do_not_mutate_patterns": [LOG_LINES],
        "pytest_add_cli_args_test_selection": list(tests),
        "pytest_add_cli_args": ["-o", "pythonpath=src .", "-p", "no:cacheprovider", "--timeout=60", "-m", FAST],
    }
    config = configparser.ConfigParser(interpolation=None)
    config["mutmut"] = FIXED_SETTINGS | {key: "\n".join(values) for key, values in settings.items()}
    with (COPY / "setup.cfg").open("w") as file:
        config.write(file)


def mutmut(*arguments: str) -> str:
    """Run mutmut in the copy, and return its output, which is also in a file."""
    with LOG.open("w") as log:
        program = str(Path(sys.executable).parent / "mutmut")
        ended = subprocess.run([program, *arguments], cwd=COPY, stdout=log, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        sys.exit(f"mutmut failed:\n{LOG.read_text()[-4000:]}")
    return LOG.read_text()


def main() -> None:
    """Report how many of a sample of mutants the tests killed, and which survived."""
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("--since", help="mutate lines that differ from this revision; else from where main was left")
    parser.add_argument("--part", choices=sorted(PARTS), help="mutate all lines of a part")
    parser.add_argument("--mutants", type=int, default=60, help="size of the random sample; 0 for all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    if options.part:
        modules = [str(path) for path in sorted(Path(PARTS[options.part][0]).rglob("*.py"))]
        lines: dict[str, Collection[int]] = {path: range(1 << 20) for path in modules if part_of(path) == options.part}
    else:
        base = git("merge-base", "HEAD", "main")
        since = options.since or (base if base != git("rev-parse", "HEAD") else "HEAD~1")
        lines = {path: found for path, found in changed_lines(since).items() if part_of(path)}
    copy_repository()
    configure(lines)
    os.chdir(COPY)
    found = [mutant for path in lines for mutant in mutants_of(path, Path(path).read_text())]
    found = [mutant for mutant in found if mutant.line in lines[mutant.path] and not mutant.is_prose()]
    sample = random.Random(options.seed).sample(found, min(options.mutants or len(found), len(found)))  # noqa: S311
    print(f"{len(sample)} of {len(found)} mutants, seed {options.seed}; log in {LOG}", flush=True)
    if not sample:
        return
    configure({mutant.path for mutant in sample})
    mutmut("run", "--max-children", str(len(os.sched_getaffinity(0))), *(mutant.name for mutant in sample))
    outcomes = dict(re.findall(r"^ +(\S+): (.+)$", mutmut("results", "--all", "true"), re.MULTILINE))
    survivors = [mutant for mutant in sample if outcomes[mutant.name] not in KILLED]
    for mutant in sorted(survivors, key=lambda mutant: (mutant.path, mutant.line)):
        print(f"{mutant.path}:{mutant.line}: {outcomes[mutant.name]}", *mutant.change, sep="\n  ")
    print(f"{len(sample) - len(survivors)} of {len(sample)} killed ({1 - len(survivors) / len(sample):.0%})")


if __name__ == "__main__":
    main()
