"""The trainer under torchrun: resumes to the bit, splits without changing anything, and never hides an end."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_engine.drafter.checkpoint import load_drafter
from dflash_engine.evaluation.steps import EvaluateRequest, EvaluationSettings, evaluate
from dflash_engine.events import EventWriter
from dflash_engine.manifest import parse_manifest, verify_files
from dflash_engine.processes import is_alive, process_identity
from dflash_engine.target.greedy import greedy_decode
from dflash_engine.target.load import load_target
from tests.models import make_target
from tests.training import events, start_training, train, write_recipe


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def whole_run(recipe: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps in one go."""
    folder = tmp_path_factory.mktemp("whole")
    code, output = train(recipe, target, folder / "run", folder / "job")
    assert code == 0, output
    return folder


def same_checkpoint(one: Path, two: Path) -> bool:
    """Whether weights, moments and counters are equal bit for bit."""
    for name in ("model.safetensors", "trainer/optimizer.safetensors"):
        a, b = load_file(one / name), load_file(two / name)
        if a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in a):
            return False
    return (one / "trainer/state.json").read_text() == (two / "trainer/state.json").read_text()


def test_a_run_leaves_whole_checkpoints_at_step_zero_and_at_the_end(whole_run: Path) -> None:
    folder = whole_run / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_0", "step_10"]
    for path in folder.iterdir():
        record = parse_manifest((path / "manifest.json").read_bytes())
        assert verify_files(path, record.model | record.resume) == []
        assert record.engine_hash == "e" * 64
        load_drafter(path)
    assert not list(Path("/dev/shm").glob("dflash-*"))


def test_the_events_tell_every_step_once_with_true_counts(whole_run: Path) -> None:
    steps = events(whole_run / "job", "train.step")
    assert [event.data["step"] for event in steps] == list(range(1, 11))
    state = json.loads((whole_run / "run/checkpoints/step_10/trainer/state.json").read_text())
    assert sum(event.data["tokens"] for event in steps) == state["tokens_seen"]
    assert steps[-1].data["epoch"] == pytest.approx(20 / 7, abs=1e-3)


def test_training_moves_every_parameter_norms_included(whole_run: Path) -> None:
    before, after = (load_file(whole_run / f"run/checkpoints/step_{n}/model.safetensors") for n in (0, 10))
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stop_at", [1, 5])  # inside the warm-up and inside the decay, both inside an epoch
def test_t12_ten_steps_are_some_then_a_resume_bit_for_bit(
    recipe: Path, target: Path, whole_run: Path, tmp_path: Path, stop_at: int
) -> None:
    first = start_training(recipe, target, tmp_path / "run", tmp_path / "job-1", f"train.checkpoint_every={stop_at}")
    # Ask for a stop before the first step: the run saves at step `stop_at` at the latest, and ends there or earlier.
    wait_for(lambda: bool(events(tmp_path / "job-1", "train.step")))
    (tmp_path / "job-1" / "control" / "stop").touch()
    assert first.wait(60) == 0
    stopped = max(int(path.name[5:]) for path in (tmp_path / "run/checkpoints").iterdir())
    assert 1 <= stopped <= 10
    code, output = train(recipe, target, tmp_path / "run", tmp_path / "job-2", f"train.checkpoint_every={stop_at}")
    assert code == 0, output
    assert events(tmp_path / "job-2", "job.started")[0].data["start_step"] == stopped
    assert same_checkpoint(tmp_path / "run/checkpoints/step_10", whole_run / "run/checkpoints/step_10")
    assert json.loads((tmp_path / "run/run.json").read_text())["jobs"] == ["job-1", "job-2"]


def test_two_target_ranks_train_the_same_drafter_bit_for_bit(
    recipe: Path, target: Path, whole_run: Path, tmp_path: Path
) -> None:
    code, output = train(recipe, target, tmp_path / "run", tmp_path / "job", "pipeline.target_ranks=2", ranks=3)
    assert code == 0, output
    assert same_checkpoint(tmp_path / "run/checkpoints/step_10", whole_run / "run/checkpoints/step_10")


def test_states_from_the_cache_train_the_same_drafter_bit_for_bit(
    recipe: Path, target: Path, whole_run: Path, tmp_path: Path
) -> None:
    code, output = train(recipe, target, tmp_path / "run", tmp_path / "job", "pipeline.states_cache_mib=64")
    assert code == 0, output
    assert same_checkpoint(tmp_path / "run/checkpoints/step_10", whole_run / "run/checkpoints/step_10")


def test_t10_a_killed_target_rank_ends_the_training_within_seconds(recipe: Path, target: Path, tmp_path: Path) -> None:
    process = start_training(
        recipe, target, tmp_path / "run", tmp_path / "job", "train.steps=100000", "train.checkpoint_every=2"
    )
    wait_for(lambda: len(events(tmp_path / "job", "train.checkpoint")) > 1)
    target_rank = next(pid for pid in _descendants(process.pid) if _environment(pid).get("RANK") == "0")
    os.kill(target_rank, signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - killed < 15, output
    assert not list(Path("/dev/shm").glob("dflash-*"))
    whole = [path for path in (tmp_path / "run/checkpoints").iterdir() if ".partial" not in path.name]
    assert whole
    for path in whole:
        record = parse_manifest((path / "manifest.json").read_bytes())
        assert verify_files(path, record.model | record.resume) == []


def test_killing_torchrun_itself_leaves_no_rank_behind(recipe: Path, target: Path, tmp_path: Path) -> None:
    process = start_training(recipe, target, tmp_path / "run", tmp_path / "job", "train.steps=100000")
    wait_for(lambda: bool(events(tmp_path / "job", "train.step")))
    ranks = [process_identity(pid) for pid in _descendants(process.pid) if "RANK" in _environment(pid)]
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(rank is not None and is_alive(rank) for rank in ranks))


def test_a_target_that_is_not_there_is_one_line_and_an_alert(recipe: Path, tmp_path: Path) -> None:
    code, output = train(recipe, tmp_path / "nothing", tmp_path / "run", tmp_path / "job")
    assert code != 0
    message = f"target {tmp_path / 'nothing'} is not there; expected a Hugging Face folder"
    assert f"dflash-engine: error: {message}" in output
    assert message in events(tmp_path / "job", "alert")[0].data["message"]


def test_a_run_is_not_resumed_with_another_target(recipe: Path, target: Path, whole_run: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", seed=1)
    code, output = train(recipe, other, whole_run / "run", tmp_path / "job")
    assert code != 0
    assert "made with another target than this run's" in output


def test_a_mask_token_that_is_a_stop_token_is_refused(recipe: Path, target: Path, tmp_path: Path) -> None:
    code, output = train(recipe, target, tmp_path / "run", tmp_path / "job", "drafter.mask_token_id=257")
    assert code != 0
    assert "'drafter.mask_token_id' 257 is a stop token of the target" in output


def test_t2_a_drafter_that_knows_one_text_by_heart_drafts_whole_blocks_of_it(tmp_path: Path) -> None:
    """Training, export, reload and evaluation agree on every position, or this falls far below the block size."""
    messages = [{"role": "user", "content": "tell"}]
    answer = {"messages": [*messages, {"role": "assistant", "content": "one day a fox met an owl"}]}
    folder = make_target(tmp_path / "target")
    answer_tokens = teach(folder, answer["messages"])
    recipe = write_recipe(tmp_path, [answer])
    code, output = train(
        recipe,
        folder,
        tmp_path / "run",
        tmp_path / "job",
        "train.steps=150",
        "train.anchors=24",
        "optimizer.learning_rate=5e-3",
        "pipeline.states_cache_mib=8",
    )
    assert code == 0, output
    assert events(tmp_path / "job", "train.step")[-1].data["accuracy"] > 0.99
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "tell", "messages": messages}) + "\n")
    request = EvaluateRequest(
        target=folder,
        drafter=tmp_path / "run/checkpoints/step_150",
        prompts=(tmp_path / "prompts.jsonl",),
        out=tmp_path,
        cache=tmp_path / "cache",
        settings=EvaluationSettings(max_new_tokens=100),
    )
    result = evaluate(request, EventWriter(tmp_path / "evaluation.jsonl"))
    (row,) = result["prompts"]
    assert row["completion"] == answer_tokens
    whole, rest = divmod(len(answer_tokens) - 1, 4)
    assert row["accepted"] == [4] * whole + ([rest] if rest else [])


def wait_for(condition: object, timeout_s: float = 60.0) -> None:
    """Poll a condition about other processes, bounded."""
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def teach(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    """Fit the tiny target to one chat until its greedy answer is the chat's; returns that answer's token ids."""
    target = load_target(folder, dtype=torch.float32)
    ids = torch.tensor([target.tokens.render(messages, False)])
    prompt = target.tokens.render(messages[:-1], True)
    model = target.model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().requires_grad_(False)
    model.save_pretrained(folder)
    (completion,) = greedy_decode(target, [prompt], max_new_tokens=100, progress=lambda done, total: None)
    answer = list(completion.tokens)
    assert answer == ids[0, len(prompt) : len(prompt) + len(answer)].tolist()
    assert completion.finish == "stop"
    return answer


def _descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *_descendants(int(child))]
    return found


def _environment(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().partition("=")[::2] for entry in raw if entry)
