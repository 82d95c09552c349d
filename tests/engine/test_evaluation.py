"""The five steps on a tiny target: what they tell, what they store, what they find ready, what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_engine.evaluation import steps
from dflash_engine.evaluation.acceptance import PromptTrace, VerificationStep
from dflash_engine.evaluation.identity import DEFINITION, EvaluationSettings, evaluation_id
from dflash_engine.events import EvalPrompt, EvalResult, Event, EventReader
from dflash_engine.fingerprint import model_fingerprint, tokenizer_fingerprint
from dflash_engine.manifest import MANIFEST_NAME, Manifest, hash_file, parse_manifest, record_files
from tests.models import START, make_drafter, make_target

NEW_TOKENS = 12
PROMPTS = ["Say a number.", "Name the longest river of the continent, please.", "Why?"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"id": f"q{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(PROMPTS)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def checkpoint(folder: Path, target: Path, *, step: int = 7, seed: int = 0) -> Path:
    """A drafter checkpoint with its manifest."""
    make_drafter(folder, seed=seed)
    record = Manifest(
        run="small",
        step=step,
        tokens_seen=0,
        created=1_800_000_000.0,
        engine_hash="",
        target_fingerprint=model_fingerprint(target),
        tokenizer_fingerprint=tokenizer_fingerprint(target),
        model=record_files(folder, ["config.json", "model.safetensors"]),
        resume={},
    )
    (folder / MANIFEST_NAME).write_text(json.dumps(record.to_json()))
    return folder


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    return checkpoint(tmp_path / "step_7", target)


Evaluate = Callable[..., int]


@pytest.fixture
def evaluate(tmp_path: Path, target: Path, drafter: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Run the command in this process; keyword arguments replace the usual ones. Returns its exit code."""
    monkeypatch.delenv("DFLASH_JOB_DIR", raising=False)

    def run(out: str = "out", **changes: Any) -> int:
        options = {"target": target, "drafter": drafter, "prompts": prompts, "cache": tmp_path / "cache"}
        options |= {"max_new_tokens": NEW_TOKENS, "threads": 1}
        arguments = ["--out", str(tmp_path / out)]
        for name, value in (options | changes).items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        return steps.main(arguments)

    return run


def events(folder: Path) -> list[Event]:
    reader = EventReader()
    found = reader.feed((folder / "events.jsonl").read_bytes())
    assert reader.unreadable == 0
    return found


def states(folder: Path) -> list[tuple[int, str]]:
    """(step, state) in order, progress left out."""
    return [
        (event.data["n"], event.data["state"])
        for event in events(folder)
        if event.type == "eval.step" and event.data["state"] != "progress"
    ]


def result(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "result.json").read_bytes())
    return document


def test_the_five_steps_are_told_in_order_and_the_result_last(evaluate: Evaluate, tmp_path: Path) -> None:
    assert evaluate() == 0
    out = tmp_path / "out"
    assert states(out) == [(n, state) for n in range(1, 6) for state in ("started", "done")]
    kinds = [event.type for event in events(out) if event.type != "eval.step"]
    assert kinds == ["job.started", *["eval.prompt"] * len(PROMPTS), "eval.result"]


def test_the_result_says_what_was_measured_on_what_and_how(
    evaluate: Evaluate, tmp_path: Path, target: Path, drafter: Path, prompts: Path
) -> None:
    assert evaluate() == 0
    found = result(tmp_path / "out")
    settings = EvaluationSettings(max_new_tokens=NEW_TOKENS)
    record = parse_manifest((drafter / MANIFEST_NAME).read_bytes())
    assert found["id"] == evaluation_id(
        checkpoint=record.model_fingerprint(),
        target=model_fingerprint(target),
        tokenizer=tokenizer_fingerprint(target),
        prompts=hash_file(prompts).sha256,
        settings=settings,
    )
    assert found["definition"] == DEFINITION
    assert (found["checkpoint"]["run"], found["checkpoint"]["step"]) == ("small", 7)
    assert found["reference"]["kind"] == "local"
    assert found["features"]["finite"] is True
    assert found["threads"] == 1
    assert found["versions"].keys() == {"python", "torch", "transformers"}
    assert len(found["seconds"]) == 5


def test_the_numbers_of_prompts_events_and_totals_are_the_same_numbers(evaluate: Evaluate, tmp_path: Path) -> None:
    assert evaluate() == 0
    found = result(tmp_path / "out")
    told = [event.as_record(EvalPrompt) for event in events(tmp_path / "out") if event.type == "eval.prompt"]
    total = events(tmp_path / "out")[-1].as_record(EvalResult)
    assert [record.accepted for record in told] == [row["accepted"] for row in found["prompts"]]
    accepted = [y for row in found["prompts"] for y in row["accepted"]]
    assert found["tau"] == total.tau == sum(accepted) / len(accepted)
    assert found["steps"] == total.steps == len(accepted) == sum(found["histogram"])
    for row in found["prompts"]:
        assert 1 + sum(row["accepted"]) == len(row["completion"]) <= NEW_TOKENS
        assert row["finish"] == ("stop" if len(row["completion"]) < NEW_TOKENS else "length")
        assert len(row["pieces"]) == len(row["completion"])
        assert len(row["matched"]) == len(row["accepted"])
        # What a step adds are the drafts it accepted and, unless a stop or the limit cut it, one token more.
        assert all(m <= y <= m + 1 for m, y in zip(row["matched"], row["accepted"], strict=True))


def test_another_checkpoint_finds_references_and_states_ready_and_needs_no_target_model(
    evaluate: Evaluate, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluate() == 0

    def refuse(folder: Path, **_: Any) -> None:
        raise AssertionError(f"{folder} was loaded although everything was ready")

    monkeypatch.setattr(steps, "load_target", refuse)
    other = checkpoint(tmp_path / "step_9", target, step=9, seed=1)
    assert evaluate("again", drafter=other) == 0
    assert {(3, "cached"), (4, "cached")} <= set(states(tmp_path / "again"))
    first, second = result(tmp_path / "out"), result(tmp_path / "again")
    assert [row["completion"] for row in first["prompts"]] == [row["completion"] for row in second["prompts"]]
    assert first["id"] != second["id"]


def test_what_changes_the_references_makes_them_anew(evaluate: Evaluate, tmp_path: Path) -> None:
    assert evaluate() == 0
    assert evaluate("longer", max_new_tokens=NEW_TOKENS + 1) == 0
    assert (3, "done") in states(tmp_path / "longer")
    assert (4, "done") in states(tmp_path / "longer")


def test_the_same_files_elsewhere_are_the_same_evaluation(
    evaluate: Evaluate, tmp_path: Path, target: Path, drafter: Path
) -> None:
    assert evaluate() == 0
    moved = shutil.copytree(target, tmp_path / "elsewhere")
    assert evaluate("again", target=moved, drafter=shutil.copytree(drafter, tmp_path / "copy")) == 0
    assert (3, "cached") in states(tmp_path / "again")
    assert result(tmp_path / "out")["id"] == result(tmp_path / "again")["id"]


@pytest.mark.parametrize(("pattern", "step"), [("references/*.json", 3), ("hidden/*/states.safetensors", 4)])
def test_a_damaged_cache_is_made_anew_and_never_used(
    pattern: str, step: int, evaluate: Evaluate, tmp_path: Path
) -> None:
    assert evaluate() == 0
    stored = next((tmp_path / "cache").glob(pattern))
    content = bytearray(stored.read_bytes())
    if step == 3:
        rows = json.loads(content)
        rows["completions"][0]["tokens"][1] ^= 1
        stored.write_text(json.dumps(rows))
    else:
        content[-3] ^= 1
        stored.write_bytes(content)
    assert evaluate("again") == 0
    assert (step, "done") in states(tmp_path / "again")
    assert result(tmp_path / "again")["prompts"] == result(tmp_path / "out")["prompts"]
    assert evaluate("third") == 0
    assert (step, "cached") in states(tmp_path / "third")
    assert not list((tmp_path / "cache").rglob("*.partial-*"))


def test_the_limit_takes_the_first_prompts(evaluate: Evaluate, tmp_path: Path) -> None:
    assert evaluate(limit=2) == 0
    assert [row["id"] for row in result(tmp_path / "out")["prompts"]] == ["q0", "q1"]


def test_a_completion_ends_with_whichever_stop_token_comes_first(
    evaluate: Evaluate, tmp_path: Path, drafter: Path
) -> None:
    assert evaluate() == 0
    said = result(tmp_path / "out")["prompts"][0]["completion"]
    stop = said[4]
    again = make_target(tmp_path / "stopping", stop_ids=[START, stop])
    assert evaluate("stopped", target=again) == 0
    row = result(tmp_path / "stopped")["prompts"][0]
    assert row["completion"] == said[: said.index(stop) + 1]
    assert row["finish"] == "stop"


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def damage(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop(MANIFEST_NAME), "has no manifest.json; stage it"),
        (drop("config.json"), "has no config.json"),
        (drop("model.safetensors"), "model.safetensors is missing"),
        (damage, "is not what its manifest says: model.safetensors has SHA-256"),
    ],
)
def test_a_checkpoint_that_does_not_hold_is_refused_before_anything_expensive(
    change: Callable[[Path], None],
    says: str,
    evaluate: Evaluate,
    drafter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(drafter)
    assert evaluate() == 6
    assert says in one_error_line(capsys)
    assert states(tmp_path / "out")[-1] == (2, "started")
    assert not (tmp_path / "out" / "result.json").exists()


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.startswith("dflash-engine: error: ")
    assert said.count("\n") == 1
    return said


def test_a_drafter_for_another_target_is_refused_with_the_reason(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(target=make_target(tmp_path / "deeper", layers=8)) == 6
    assert "made for a target of 6 layers, this one has 8" in one_error_line(capsys)


def test_a_drafter_trained_for_other_weights_is_evaluated_with_a_warning(evaluate: Evaluate, tmp_path: Path) -> None:
    assert evaluate(target=make_target(tmp_path / "sister", seed=5)) == 0
    warnings = [event.data["message"] for event in events(tmp_path / "out") if event.type == "alert"]
    assert len(warnings) == 1
    assert "the drafter was trained for target" in warnings[0]


def test_a_missing_target_is_one_line_and_exit_code_5(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(target=tmp_path / "nowhere") == 5
    assert f"target {tmp_path / 'nowhere'} is not there" in one_error_line(capsys)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "line 2: expected an object with messages"),
        ('{"id": "x"}', "line 2: expected an object with messages"),
        ('{"messages": []}', "line 2: expected an object with messages"),
        ('{"messages": [{"role": "user", "content": 3}]}', "line 2: expected an object with messages"),
    ],
)
def test_a_bad_prompt_row_is_named_by_file_and_line(
    row: str, says: str, evaluate: Evaluate, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prompts.read_text().splitlines()[0]
    prompts.write_text(f"{first}\n{row}\n")
    assert evaluate() == 7
    said = one_error_line(capsys)
    assert str(prompts) in said
    assert says in said


def test_missing_and_empty_prompt_files_are_refused(
    evaluate: Evaluate, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text("\n")
    assert evaluate() == 7
    assert "no prompt in" in one_error_line(capsys)
    prompts.unlink()
    assert evaluate() == 7
    assert "cannot be read" in one_error_line(capsys)


def test_completions_of_one_token_have_no_acceptance_length(
    evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(max_new_tokens=1) == 7
    assert "no prompt has a verification step" in one_error_line(capsys)


@pytest.mark.parametrize("size", [1, 5])
def test_a_block_that_the_drafter_was_not_trained_for_is_refused(
    size: int, evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(block_size=size) == 6
    assert f"block size {size} was asked for, the drafter was trained with 4" in one_error_line(capsys)


def test_an_evaluation_asked_for_under_another_id_is_refused(
    evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(id="0" * 64) == 6
    assert "was asked for" in one_error_line(capsys)


def test_a_count_below_its_least_value_is_a_usage_error(evaluate: Evaluate, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluate(max_new_tokens=0)
    assert ended.value.code == 2
    assert "--max-new-tokens: 0 is less than 1" in capsys.readouterr().err


def test_a_draft_that_was_taken_unverified_ends_the_evaluation(
    evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = steps.walk

    def careless(*arguments: Any, **options: Any) -> list[PromptTrace]:
        """Stands for a defect in the walk, which cannot be had otherwise: one draft is kept unseen."""
        first, *others = honest(*arguments, **options)
        *before, last = first.steps
        wrong = VerificationStep(last.offered, last.matched, (*last.tokens[:-1], last.tokens[-1] ^ 1))
        return [PromptTrace((*before, wrong)), *others]

    monkeypatch.setattr(steps, "walk", careless)
    assert evaluate() == 1
    assert "differ from the reference's" in one_error_line(capsys)
    assert not (tmp_path / "out" / "result.json").exists()


def test_a_job_writes_its_events_into_the_job_folder(
    tmp_path: Path, target: Path, drafter: Path, prompts: Path
) -> None:
    job = tmp_path / "jobs" / "eval-1"
    job.mkdir(parents=True)
    command = [sys.executable, "-m", "dflash_engine.cli", "evaluate", "--threads", "1", "--out", str(job)]
    command += ["--target", str(target), "--drafter", str(drafter), "--prompts", str(prompts), str(prompts)]
    environment = {**os.environ, "DFLASH_JOB_DIR": str(job), "DFLASH_JOB_ID": "eval-1"}
    ended = subprocess.run(
        [*command, "--max-new-tokens", "4"], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    first = events(job)[0]
    assert (first.type, first.data["job"], first.data["kind"]) == ("job.started", "eval-1", "evaluate")
    assert len(result(job)["prompts"]) == 2 * len(PROMPTS)
