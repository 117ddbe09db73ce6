"""Checked-in CRDs and pages match the models."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.api import KINDS
from kvstrata.api.engine_flags import OWNED_FLAGS
from tools.generate import __main__ as generate
from tools.generate.pictures import render

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_checked_in_files_are_current() -> None:
    assert generate.check(REPOSITORY) == []


def test_check_fails_on_a_changed_a_missing_and_a_left_over_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--root", str(tmp_path)]) == 0
    assert generate.main(["--check", "--root", str(tmp_path)]) == 0
    (tmp_path / "crds" / "kvstrata.io_tenantgroups.yaml").unlink()
    assert generate.main(["--check", "--root", str(tmp_path)]) == 1
    assert generate.main(["--root", str(tmp_path)]) == 0

    crd = tmp_path / "crds" / "kvstrata.io_cachetiers.yaml"
    good = crd.read_text()
    crd.write_text(good.replace("shortNames", "shortnames"))
    capsys.readouterr()
    assert generate.main(["--check", "--root", str(tmp_path)]) == 1
    assert "-    shortnames:\n+    shortNames:" in capsys.readouterr().out
    crd.write_text(good)

    stale = tmp_path / "crds" / "kvstrata.io_oldkinds.yaml"
    stale.write_text(generate.CRD_HEADER)
    foreign = tmp_path / "docs" / "reference" / "notes.md"
    foreign.write_text("# Written by hand\n")
    assert generate.main(["--check", "--root", str(tmp_path)]) == 1
    assert generate.main(["--root", str(tmp_path)]) == 0
    assert not stale.exists()
    assert foreign.exists()


def test_a_second_run_touches_nothing(tmp_path: Path) -> None:
    assert generate.write(tmp_path)
    assert generate.write(tmp_path) == []


def test_every_kind_has_a_crd_and_a_page_that_documents_each_field_and_rule() -> None:
    files = {str(path): text for path, text in generate.generated_files(REPOSITORY).items()}
    for kind in KINDS:
        assert f"crds/kvstrata.io_{kind.INFO.plural}.yaml" in files
        page = files[f"docs/reference/{kind.INFO.kind.lower()}.md"]
        assert all(rule.message in page for rule in kind.RULES)
        spec = kind.model_fields["spec"].annotation
        assert spec is not None
        for field in spec.model_fields.values():
            assert f"`spec.{field.alias}`" in page


def test_the_page_of_cached_models_lists_every_owned_flag() -> None:
    page = generate.generated_files(REPOSITORY)[Path("docs/reference/cachedmodel.md")]
    assert all(f"| `{flag}` |" in page for flag in OWNED_FLAGS)


def test_a_picture_shows_each_step_and_refuses_an_unknown_column() -> None:
    text = "A way\nleft | right\nleft -> right: a < b\nright: stays\n== later\n"
    svg = render(text)
    assert [word in svg for word in ("A way", "left", "right", "a &lt; b", "stays", "later")] == [True] * 6
    assert svg.count('marker-end="url(#end)"') == 1
    with pytest.raises(ValueError, match="nowhere"):
        render(text + "left -> nowhere: lost\n")


def test_a_picture_without_its_text_is_left_over(tmp_path: Path) -> None:
    generate.write(tmp_path)
    left = tmp_path / "docs/pictures/gone.svg"
    left.parent.mkdir()
    left.write_text(render("A way\nleft\nleft: alone\n"))
    assert list(generate.leftovers(tmp_path, generate.generated_files(tmp_path))) == [Path("docs/pictures/gone.svg")]
