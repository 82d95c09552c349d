"""What can be seen of hosts and jobs, as plain records: the only thing that a board is fed with.

A live watch makes them from SSH, a replay from a file, and what is shown depends on nothing else. Texts that
came from a host are printable already. Importable without asyncssh, so that a replay starts fast.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "CheckpointSeen",
    "CheckpointsSeen",
    "EventSeen",
    "HostSeen",
    "JobReset",
    "JobSeen",
    "JobsSeen",
    "LoadSeen",
    "Observation",
    "PromptSeen",
    "ResultSeen",
    "Said",
    "TransferSeen",
    "TransferState",
]


class HostSeen(msgspec.Struct, frozen=True, tag_field="seen", tag="host"):
    """The connection to a host. `retry_s`: seconds until the next try, where it is not up.

    `fault` is why it is not up. `clock_offset_s` is the host's clock minus this machine's.
    """

    host: str
    state: Literal["connecting", "up", "unreachable"]
    fault: str = ""
    retry_s: float | None = None
    clock_offset_s: float = 0.0


class LoadSeen(msgspec.Struct, frozen=True, tag_field="seen", tag="load"):
    """What a host is busy with; None is what it does not tell. `cpu_share`: busy share of all its cores, 0 to 1."""

    host: str
    cpu_share: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None


class JobSeen(msgspec.Struct, frozen=True):
    """A job as `core.jobs.JobView` shows it; `checkpoint` is `RUN:step_N` of an evaluation."""

    id: str
    kind: str
    run: str
    state: str
    reason: str
    created: float
    checkpoint: str = ""

    @property
    def is_live(self) -> bool:
        """Whether it runs, or is about to."""
        return self.state in ("starting", "running")

    @property
    def ended_badly(self) -> bool:
        """Whether it ended in a way that nobody asked for."""
        return self.state in ("failed", "killed", "lost")


class JobsSeen(msgspec.Struct, frozen=True, tag_field="seen", tag="jobs"):
    """All jobs of a host, oldest first."""

    host: str
    jobs: list[JobSeen]


class JobReset(msgspec.Struct, frozen=True, tag_field="seen", tag="reset"):
    """What was known of a job's events is void: its file is another one now."""

    host: str
    job: str


class EventSeen(msgspec.Struct, frozen=True, tag_field="seen", tag="event"):
    """One event of a job. `t` is the host's clock."""

    host: str
    job: str
    t: float
    type: str
    data: dict[str, Any]


class CheckpointSeen(msgspec.Struct, frozen=True):
    """One checkpoint folder. `state`: whole, model only, incomplete, foreign; `step` None where unknown.

    `fingerprint` is its manifest's model fingerprint, empty without one. `created` is the host's Unix time.
    """

    run: str
    name: str
    step: int | None
    state: str
    reason: str
    size_bytes: int
    created: float
    fingerprint: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether it can be staged and evaluated."""
        return self.state in ("whole", "model only", "foreign")


class CheckpointsSeen(msgspec.Struct, frozen=True, tag_field="seen", tag="checkpoints"):
    """All checkpoints of a host."""

    host: str
    checkpoints: list[CheckpointSeen]


class PromptSeen(msgspec.Struct, frozen=True):
    """One prompt of a result. `accepted`: tokens that each verification step yielded; `matched`: drafts it took.

    `pieces` are the texts of the completion's tokens; the first is the prefill's, of no step.
    """

    id: str
    tau: float | None
    accepted: list[int]
    matched: list[int] = []
    pieces: list[str] = []


class ResultSeen(msgspec.Struct, frozen=True, tag_field="seen", tag="result"):
    """What of a stored `result.json` is shown. `comparable` is equal for results that may be compared."""

    host: str
    job: str
    checkpoint: str
    tau: float
    tau_per_prompt: float
    steps: int
    tokens: int
    block_size: int
    histogram: list[int]
    acceptance_by_position: list[float]
    prompts: list[PromptSeen]
    comparable: str = ""
    conditions: str = ""
    feature_mean: float | None = None
    feature_std: float | None = None
    step_seconds: dict[str, float] = {}


TransferState = Literal["running", "done", "failed", "interrupted"]


class TransferSeen(msgspec.Struct, frozen=True, tag_field="seen", tag="transfer"):
    """One staging. `seconds` since it began; `rate` in bytes a second while it copies, else None."""

    id: str
    source: str
    destination: str
    run: str
    checkpoint: str
    state: TransferState
    phase: str = ""
    bytes_done: int = 0
    bytes_total: int = 0
    seconds: float = 0.0
    rate: float | None = None
    message: str = ""


class Said(msgspec.Struct, frozen=True, tag_field="seen", tag="said"):
    """The console's own words. `level`: info, warning, error."""

    text: str
    level: Literal["info", "warning", "error"] = "info"


Observation = HostSeen | LoadSeen | JobsSeen | JobReset | EventSeen | CheckpointsSeen | ResultSeen | TransferSeen | Said
