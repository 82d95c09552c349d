"""The demo's shortened form on the real SmolLM2-135M-Instruct, by the command a person types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.smollm2
@pytest.mark.timeout(1200)
def test_a_short_training_raises_acceptance_on_held_out_prompts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from dflash_console.cli import main; main()", "demo", "--json"]
    command += ["--root", str(tmp_path / "demo"), "--steps", "250", "--limit", "12"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1100)
    if done.returncode == 13 and os.environ.get("DFLASH_REQUIRE_SMOLLM2") != "1":
        pytest.skip(f"the real target cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["untrained"]["tau"] < 1.1
    assert summary["gain"] >= 0.15
    assert summary["steps"] == 250
    assert summary["trained"]["prompts"] == 12
