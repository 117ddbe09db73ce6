"""`python -m tools.generate [--check]`: write the CRDs, their copy in the chart, reference, pictures and cited figures.

With --check nothing is written; the exit code is 1 when a checked-in file differs from the generated one, or is
left over from a kind that no longer exists.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvstrata.api.base import GROUP
from tools.generate.compatibility import breaking_changes, reduced
from tools.generate.contract_reference import build_audit_reference, build_receipt_reference
from tools.generate.crd import build_crds
from tools.generate.figures import FigureError, build_pages
from tools.generate.pictures import FOLDER as PICTURE_FOLDER
from tools.generate.pictures import HEADER as PICTURE_HEADER
from tools.generate.pictures import build_pictures
from tools.generate.reference import HEADER as REFERENCE_HEADER
from tools.generate.reference import build_reference

CRD_HEADER = "# Generated from the models in operator/src/kvstrata/api by `make generate`. Do not edit.\n"
CRD_FOLDER = Path("crds")
CHART_FOLDER = Path("charts/kvstrata-crds/files")
REFERENCE_FOLDER = Path("docs/reference")
BASELINE = Path(__file__).with_name("baseline.json")


class _PlainDumper(yaml.SafeDumper):
    """Writes lists indented below their key, and never anchors or aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        """Never."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - likewise
        """Indent lists, too."""
        super().increase_indent(flow, False)


def render_yaml(document: Mapping[str, Any]) -> str:
    """`document` as YAML in the order of its keys."""
    return yaml.dump(document, Dumper=_PlainDumper, sort_keys=False, width=110, allow_unicode=True)


def generated_files(root: Path) -> dict[Path, str]:
    """Every generated file, relative to the repository at `root`, with its content."""
    crds = {
        f"{GROUP}_{crd['spec']['names']['plural']}.yaml": CRD_HEADER + "---\n" + render_yaml(crd)
        for crd in build_crds().values()
    }
    # A chart can read only its own folder, so it holds a copy.
    files = {folder / name: text for folder in (CRD_FOLDER, CHART_FOLDER) for name, text in crds.items()}
    files |= {REFERENCE_FOLDER / name: page for name, page in build_reference().items()}
    return files | {
        REFERENCE_FOLDER / "receipt.md": build_receipt_reference(),
        REFERENCE_FOLDER / "audit.md": build_audit_reference(),
        **build_pictures(root),
        **build_pages(root),
    }


def leftovers(root: Path, wanted: Mapping[Path, str]) -> Iterator[Path]:
    """Generated files that are no longer generated; files without our header are someone else's."""
    for folder, pattern, header in (
        (CRD_FOLDER, f"{GROUP}_*.yaml", CRD_HEADER),
        (CHART_FOLDER, f"{GROUP}_*.yaml", CRD_HEADER),
        (REFERENCE_FOLDER, "*.md", REFERENCE_HEADER),
        (PICTURE_FOLDER, "*.svg", PICTURE_HEADER),
    ):
        for path in sorted((root / folder).glob(pattern)):
            if path.relative_to(root) not in wanted and path.read_text().startswith(header):
                yield path.relative_to(root)


def check(root: Path) -> list[str]:
    """Return a unified diff for each file that differs from its generated content."""
    wanted = generated_files(root)
    differences = [f"{path}: is no longer generated; run `make generate`\n" for path in leftovers(root, wanted)]
    for path, content in wanted.items():
        current = (root / path).read_text() if (root / path).exists() else ""
        if current != content:
            lines = difflib.unified_diff(
                current.splitlines(keepends=True), content.splitlines(keepends=True), f"{path} (checked in)", f"{path}"
            )
            differences.append("".join(lines))
    return differences


def baseline() -> dict[str, Any]:
    """Return the reduced schema of each kind."""
    return {
        crd["spec"]["names"]["kind"]: reduced(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        for crd in build_crds().values()
    }


def breaks() -> list[str]:
    """Return a line for each change since the baseline that would break stored objects."""
    before, after = json.loads(BASELINE.read_text()), baseline()
    found = [f"{kind}: was removed" for kind in before if kind not in after]
    for kind in before.keys() & after.keys():
        found += breaking_changes(before[kind], after[kind], kind)
    return [f"{one}; before a release `make baseline` accepts it\n" for one in sorted(found)]


def write(root: Path) -> list[Path]:
    """Write changed files and remove obsolete ones; return the touched paths."""
    wanted = generated_files(root)
    touched = list(leftovers(root, wanted))
    for path in touched:
        (root / path).unlink()
    for path, content in wanted.items():
        target = root / path
        if not target.exists() or target.read_text() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
            touched.append(path)
    return touched


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file differs")
    parser.add_argument("--baseline", action="store_true", help="make the CRDs the baseline of the compatibility check")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the repository (default: current folder)")
    options = parser.parse_args(arguments)
    if options.baseline:
        BASELINE.write_text(json.dumps(baseline(), indent=1) + "\n")
        return 0
    try:
        if options.check:
            differences = [*check(options.root), *breaks()]
            sys.stdout.writelines(differences)
            return 1 if differences else 0
        for path in write(options.root):
            sys.stdout.write(f"{path}\n")
    except FigureError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
