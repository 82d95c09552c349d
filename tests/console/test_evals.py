"""run-eval on a real host: one job and one result however often and from however many consoles it is asked for.

The first tests run the real evaluator on a tiny target and drafter; where an evaluation must be held, fail or be
killed at a chosen moment, `ScriptedPython` stands for the evaluator, and for nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from dflash_console.core import host_lock
from dflash_console.core.errors import IntegrityError, JobFailedError, NotFoundError, UnreachableError
from dflash_console.core.evals import EvalOutcome, resolve_checkpoint, run_eval
from dflash_console.core.history import History, default_path
from dflash_console.core.jobs import job_ref, list_jobs, view_job
from dflash_console.core.profiles import Profile
from dflash_console.core.ssh import Connections, HostConnection
from dflash_engine.evaluation.identity import EvaluationSettings, evaluation_id
from dflash_engine.events import Event
from dflash_engine.fingerprint import model_fingerprint, tokenizer_fingerprint
from dflash_engine.manifest import parse_manifest
from tests.checkpoint_folders import make_checkpoint, make_foreign, write_manifest
from tests.models import make_drafter, make_target
from tests.scripted_python import ScriptedPython
from tests.tcp_relay import Relay

SETTINGS = EvaluationSettings(max_new_tokens=8)

# What one kind of server proves, where nothing depends on the server.
one_kind = pytest.mark.parametrize("ssh_host", ["openssh"], indirect=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter trained for it, and prompts."""
    folder = tmp_path_factory.mktemp("models")
    make_target(folder / "target")
    make_drafter(folder / "drafter")
    prompts = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"say {i}"}]} for i in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return folder


@pytest.fixture
def profile(ssh_host: Profile, models: Path) -> Profile:
    return _changed(ssh_host, targets={"tiny": str(models / "target")})


@pytest.fixture
def scripted(tmp_path: Path) -> ScriptedPython:
    return ScriptedPython(tmp_path / "scripted")


@pytest.fixture
def scripted_profile(profile: Profile, scripted: ScriptedPython) -> Profile:
    return _changed(profile, python=str(scripted.path))


@pytest.fixture
async def host(profile: Profile, models: Path) -> AsyncIterator[HostConnection]:
    """The host with `run1:step_5` on it."""
    async with Connections(profile) as hosts:
        conn = await hosts.get("ct200")
        _put_checkpoint(conn, models, 5)
        yield conn


def _changed(profile: Profile, **changes: object) -> Profile:
    host = msgspec.structs.replace(profile.hosts["ct200"], **changes)
    return msgspec.structs.replace(profile, hosts={"ct200": host})


def _put_checkpoint(conn: HostConnection, models: Path, step: int, *, run: str = "run1") -> Path:
    folder = Path(conn.state, "runs", run, "checkpoints", f"step_{step}")
    shutil.copytree(models / "drafter", folder)
    prints = model_fingerprint(models / "target"), tokenizer_fingerprint(models / "target")
    write_manifest(folder, run, step, target_fingerprint=prints[0], tokenizer_fingerprint=prints[1])
    return folder


async def _evaluate(
    profile: Profile,
    models: Path,
    *,
    checkpoint: str | None = "run1:step_5",
    target: str | None = "tiny",
    prompts: Sequence[Path] | None = None,
    settings: EvaluationSettings = SETTINGS,
    heard: list[Event] | None = None,
) -> EvalOutcome:
    async with Connections(profile) as hosts:
        return await run_eval(
            hosts,
            "ct200",
            checkpoint=checkpoint,
            target=target,
            prompts=[models / "prompts.jsonl"] if prompts is None else prompts,
            settings=settings,
            on_event=([] if heard is None else heard).append,
        )


class _Telling(list[Event]):
    """Tells when the first event has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.first = asyncio.Event()

    def append(self, event: Event) -> None:
        super().append(event)
        self.first.set()


class _CutAtFirst(list[Event]):
    """Cuts the relay's connections at the first event."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    def append(self, event: Event) -> None:
        super().append(event)
        self._relay.cut()


async def test_an_evaluation_ends_with_a_result_under_its_id_in_the_history(
    profile: Profile, host: HostConnection, models: Path
) -> None:
    heard: list[Event] = []
    outcome = await _evaluate(profile, models, checkpoint=None, target=None, heard=heard)
    record = parse_manifest(Path(host.state, "runs/run1/checkpoints/step_5/manifest.json").read_bytes())
    expected = evaluation_id(
        checkpoint=record.model_fingerprint(),
        target=model_fingerprint(models / "target"),
        tokenizer=tokenizer_fingerprint(models / "target"),
        prompts=hashlib.sha256((models / "prompts.jsonl").read_bytes()).hexdigest(),
        settings=SETTINGS,
    )
    assert outcome.evaluation_id == expected == outcome.result["id"]
    assert outcome.job == f"eval-{expected[:16]}"
    assert (outcome.checkpoint, outcome.target) == ("run1:step_5", "tiny")
    assert (outcome.joined, outcome.reused) == (False, False)
    assert outcome.result["tau"] >= 1.0
    types = [event.type for event in heard]
    assert types[0] == "job.started"
    assert types[-1] == "job.finished"
    assert types.count("eval.prompt") == 3
    with History() as history:
        (row,) = history.evaluations()
    assert (row.evaluation_id, row.tau, row.step) == (expected, outcome.result["tau"], 5)


@pytest.mark.usefixtures("host")
async def test_a_finished_evaluation_is_reused_and_tells_its_events_again(
    scripted_profile: Profile, models: Path, scripted: ScriptedPython
) -> None:
    first_heard: list[Event] = []
    again_heard: list[Event] = []
    first = await _evaluate(scripted_profile, models, heard=first_heard)
    again = await _evaluate(scripted_profile, models, heard=again_heard)
    assert (first.reused, again.reused) == (False, True)
    assert again.result == first.result
    assert again_heard == first_heard
    assert len(scripted.runs()) == 1


@pytest.mark.usefixtures("host")
async def test_two_consoles_that_ask_at_once_share_one_job(
    scripted_profile: Profile, models: Path, scripted: ScriptedPython
) -> None:
    scripted.hold()
    heard = _Telling(), _Telling()
    both = asyncio.gather(*(_evaluate(scripted_profile, models, heard=mine) for mine in heard))
    await asyncio.gather(*(mine.first.wait() for mine in heard))
    await scripted.release()
    outcomes = await both
    assert sorted(outcome.joined for outcome in outcomes) == [False, True]
    assert outcomes[0].result == outcomes[1].result
    assert heard[0] == heard[1]
    assert len(scripted.runs()) == 1


@one_kind
async def test_a_running_evaluation_whose_console_lost_its_connection_is_joined(
    scripted_profile: Profile, host: HostConnection, models: Path, scripted: ScriptedPython
) -> None:
    scripted.hold()
    async with Relay.to(scripted_profile.hosts["ct200"]) as relay:
        cut_off = msgspec.structs.replace(scripted_profile, hosts={"ct200": relay.host})
        heard = _CutAtFirst(relay)
        with pytest.raises(UnreachableError, match=r"goes on at ct200 as job eval-\w+; the same command joins it"):
            await _evaluate(cut_off, models, heard=heard)
    (job,) = await list_jobs(host)
    assert job.state == "running"
    heard_again = _Telling()
    joining = asyncio.create_task(_evaluate(scripted_profile, models, heard=heard_again))
    await heard_again.first.wait()
    await scripted.release()
    outcome = await joining
    assert outcome.joined
    assert len(scripted.runs()) == 1


@one_kind
async def test_a_dead_evaluation_is_moved_aside_and_run_anew_once(
    scripted_profile: Profile, host: HostConnection, models: Path, scripted: ScriptedPython
) -> None:
    scripted.hold()
    heard = _Telling()
    first = asyncio.create_task(_evaluate(scripted_profile, models, heard=heard))
    await heard.first.wait()
    (job,) = await list_jobs(host)
    process = json.loads(Path(job_ref(host, job.id).path, "process.json").read_text())
    os.kill(process["pid"], signal.SIGKILL)
    with pytest.raises(JobFailedError, match="is lost"):
        await first
    both = asyncio.gather(_evaluate(scripted_profile, models), _evaluate(scripted_profile, models))
    await scripted.release()
    outcomes = await both
    assert {outcome.job for outcome in outcomes} == {job.id}
    assert [outcome.reused or outcome.joined for outcome in outcomes].count(False) == 1
    assert len(scripted.runs()) == 2
    assert (await view_job(host, f"{job.id}.lost-1")).state == "lost"
    assert not Path(host.state, "jobs", f"{job.id}.lost-2").exists()


@one_kind
@pytest.mark.usefixtures("host")
async def test_a_failed_evaluation_gives_the_engines_own_words_and_may_be_tried_again(
    scripted_profile: Profile, models: Path, scripted: ScriptedPython
) -> None:
    scripted.fail(now=True)
    with pytest.raises(JobFailedError, match=r"is failed.*no room for the hidden states"):
        await _evaluate(scripted_profile, models)
    scripted.fail(now=False)
    outcome = await _evaluate(scripted_profile, models)
    assert (outcome.joined, outcome.reused) == (False, False)


@one_kind
@pytest.mark.parametrize(
    "damage", ["{", '{"id": "another", "tau": 1, "tau_per_prompt": 1, "acceptance_by_position": []}']
)
async def test_a_damaged_result_is_not_reused(
    scripted_profile: Profile, host: HostConnection, models: Path, scripted: ScriptedPython, damage: str
) -> None:
    first = await _evaluate(scripted_profile, models)
    Path(first.path, "result.json").write_text(damage)
    again = await _evaluate(scripted_profile, models)
    assert not again.reused
    assert again.result == first.result
    assert len(scripted.runs()) == 2
    assert Path(host.state, "jobs", f"{first.job}.lost-1").is_dir()


@one_kind
@pytest.mark.usefixtures("host")
async def test_what_changes_the_numbers_changes_the_job(
    scripted_profile: Profile, models: Path, scripted: ScriptedPython, tmp_path: Path
) -> None:
    other_prompts = tmp_path / "other.jsonl"
    other_prompts.write_text('{"id": "x", "messages": [{"role": "user", "content": "other"}]}\n')
    outcomes = [
        await _evaluate(scripted_profile, models),
        await _evaluate(scripted_profile, models, settings=EvaluationSettings(max_new_tokens=9)),
        await _evaluate(scripted_profile, models, prompts=[other_prompts]),
    ]
    assert len({outcome.job for outcome in outcomes}) == 3
    arguments = scripted.runs()[1]
    assert arguments[arguments.index("--max-new-tokens") + 1] == "9"


@one_kind
@pytest.mark.usefixtures("host")
async def test_a_history_that_cannot_be_used_is_an_alert_and_not_a_failure(
    scripted_profile: Profile, models: Path
) -> None:
    default_path().parent.mkdir(parents=True)
    default_path().write_bytes(b"not a database" * 1000)
    heard: list[Event] = []
    outcome = await _evaluate(scripted_profile, models, heard=heard)
    assert outcome.result["tau"] == 1.5
    assert heard[-1].type == "alert"
    assert "not in the history" in heard[-1].data["message"]


@one_kind
async def test_nothing_is_launched_when_the_preflight_fails(
    scripted_profile: Profile, host: HostConnection, models: Path, scripted: ScriptedPython
) -> None:
    weights = Path(host.state, "runs/run1/checkpoints/step_5/model.safetensors")
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(IntegrityError, match="SHA-256"):
        await _evaluate(scripted_profile, models)
    assert await list_jobs(host) == []
    assert scripted.runs() == []


@one_kind
@pytest.mark.usefixtures("host")
async def test_missing_and_empty_prompts_are_said_before_anything_else(
    profile: Profile, models: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    for prompts, says in (
        ([], "No prompt files"),
        ([tmp_path / "absent.jsonl"], r"absent.jsonl cannot be read: No such file"),
        ([empty], "hold no prompt"),
    ):
        with pytest.raises(NotFoundError, match=says):
            await _evaluate(profile, models, prompts=prompts)


@one_kind
async def test_latest_is_the_newest_usable_of_the_run_and_nothing_asked_that_of_the_host(
    host: HostConnection, models: Path
) -> None:
    _put_checkpoint(host, models, 9, run="run2")
    broken = _put_checkpoint(host, models, 11, run="run1")
    (broken / "model.safetensors").unlink()
    make_foreign(Path(host.state), "run1", "step_10")
    for wanted, found in (("run1:latest", "step_5"), ("run1", "step_5"), (None, "step_9"), ("run1:step_11", "step_11")):
        assert (await resolve_checkpoint(host, wanted)).name == found
    with pytest.raises(NotFoundError, match="run1:step_12"):
        await resolve_checkpoint(host, "run1:step_12")
    make_checkpoint(Path(host.state), "run3", 1)
    shutil.rmtree(Path(host.state, "runs/run3/checkpoints/step_1/trainer"))
    Path(host.state, "runs/run3/checkpoints/step_1/config.json").unlink()
    with pytest.raises(NotFoundError, match=r"no usable checkpoint of run run3 \(run3:step_1 is incomplete"):
        await resolve_checkpoint(host, "run3:latest")


@one_kind
async def test_a_console_that_died_while_it_claimed_does_not_block_the_next(
    scripted_profile: Profile, host: HostConnection, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = await _evaluate(scripted_profile, models)
    shutil.rmtree(outcome.path)
    lock = Path(host.state, "cache", "locks", f"job-{outcome.job}.lock")
    lock.mkdir()
    (lock / "owner-dead").touch()
    monkeypatch.setattr(host_lock, "STALE_AFTER_S", 1.2)
    again = await _evaluate(scripted_profile, models)
    assert not again.reused
