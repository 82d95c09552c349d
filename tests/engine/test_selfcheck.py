"""The engine against the public packages' recorded outputs, and that a wrong engine is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_engine.drafter import visibility
from dflash_engine.selfcheck.command import PARTS, main, selfcheck
from dflash_engine.selfcheck.models import Reference, overridden
from tests.reference import REFERENCE


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_case_of_the_public_packages_holds(part: str, tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    folder.mkdir()
    for name in {part.split("/")[0], "models"}:
        (folder / name).symlink_to(REFERENCE / name)
    reports = selfcheck(Reference(folder, torch.device("cpu")))
    checks = reports[part].checks
    assert checks
    assert [check for check in checks if not check.holds] == []


def test_the_command_fails_for_an_engine_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "reference"
    folder.mkdir()
    for name in ("forward", "models"):
        (folder / name).symlink_to(REFERENCE / name)
    rule = visibility.LayerRule.__init__

    def causal_everywhere(self: Any, causal: bool, window: int | None) -> None:  # the class's own
        rule(self, True, window)

    monkeypatch.setattr(visibility.LayerRule, "__init__", causal_everywhere)
    assert main(["--reference", str(folder), "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {"mask of layer 0", "hidden", "logits"} <= {c["quantity"] for c in checks if not c["holds"]}


def test_an_empty_folder_does_not_pass(tmp_path: Path) -> None:
    assert main(["--reference", str(tmp_path)]) == 1


def test_overrides_change_and_remove_nested_keys() -> None:
    document = {"a": {"b": 1, "c": 2}, "d": 3}
    assert overridden(document, {"a.b": 5, "a.c": "__delete__", "e.f": 6}) == {"a": {"b": 5}, "d": 3, "e": {"f": 6}}
    assert document == {"a": {"b": 1, "c": 2}, "d": 3}
