"""The history: what it keeps, and that its troubles are one sentence."""

from __future__ import annotations

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_console.core.history import EvaluationRow, History, HistoryError, StagingRow, default_path


def _evaluation(evaluation_id: str = "a" * 64, *, finished: float = 1.0, tau: float = 1.6) -> EvaluationRow:
    return EvaluationRow(
        evaluation_id,
        "ct129",
        finished,
        "eval-aaaa",
        "run1",
        "step_5",
        5,
        "smollm2",
        tau,
        {"tau": tau, "steps": 9},
    )


def test_what_was_stored_comes_back_newest_first_after_reopening(tmp_path: Path) -> None:
    staging = StagingRow(3.0, "ct200", "ct129", "run1", "step_5", "f" * 64, 10, 20, 0.5)
    with History(tmp_path / "h.sqlite3") as history:
        history.add_evaluation(_evaluation("a" * 64, finished=1.0))
        history.add_evaluation(_evaluation("b" * 64, finished=2.0))
        history.add_staging(staging)
    with History(tmp_path / "h.sqlite3") as history:
        assert [row.evaluation_id[0] for row in history.evaluations()] == ["b", "a"]
        assert history.evaluations(limit=1)[0].result == {"tau": 1.6, "steps": 9}
        assert history.stagings() == [staging]


def test_the_same_evaluation_on_a_host_is_one_row(tmp_path: Path) -> None:
    with History(tmp_path / "h.sqlite3") as history:
        history.add_evaluation(_evaluation(tau=1.0))
        history.add_evaluation(_evaluation(tau=2.0))
        assert [row.tau for row in history.evaluations()] == [2.0]


def test_a_newer_schema_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite3"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version=99")
    database.commit()
    database.close()
    before = path.read_bytes()
    with pytest.raises(HistoryError, match=r"has schema 99, this console knows 1"):
        History(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite3"
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 40)
    with pytest.raises(HistoryError, match="cannot be used"):
        History(path)


def test_a_locked_history_fails_to_write_with_a_history_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_console.core.history._BUSY_TIMEOUT_S", 0.05)
    with History(tmp_path / "h.sqlite3") as history:
        other = sqlite3.connect(tmp_path / "h.sqlite3", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(HistoryError, match="locked"):
            history.add_evaluation(_evaluation())
        other.execute("COMMIT")
        other.close()
        history.add_evaluation(_evaluation())


@pytest.mark.skipif(os.geteuid() != 0, reason="a folder that even root cannot write needs /proc, and root")
def test_a_folder_that_cannot_be_written_is_a_history_error() -> None:
    with pytest.raises(HistoryError, match="cannot be used"):
        History(Path("/proc/self/history/h.sqlite3"))


def test_many_consoles_may_open_a_new_history_at_once(tmp_path: Path) -> None:
    def one(n: int) -> None:
        with History(tmp_path / "h.sqlite3") as history:
            history.add_evaluation(_evaluation(f"{n:064d}"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    with History(tmp_path / "h.sqlite3") as history:
        assert len(history.evaluations()) == 8


def test_the_place_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_DATA_DIR", str(tmp_path))
    assert default_path() == tmp_path / "history.sqlite3"
