"""Fixtures for everybody: SSH hosts that are really there, and a home folder that is nobody's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dflash_console.core.profiles import Profile
from tests.hosts import KINDS, OpenSSHHost, serving

# Before torch is loaded anywhere: waiting threads sleep, as in `dflash-engine`; on a busy machine spinning ones
# make tiny models five times as slow.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_PERSONAL = ("SSH_AUTH_SOCK", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "DFLASH_PROFILE")


@pytest.fixture(autouse=True)
def operator_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home: neither the developer's SSH files and agent nor their data folder take part in a test.

    The cache stays theirs: what was fetched once for the tests need not be fetched again.
    """
    home = tmp_path_factory.mktemp("operator")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DFLASH_DATA_DIR", str(home / "data"))
    for name in _PERSONAL:
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture(params=KINDS)
def ssh_host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Profile]:
    """A profile with one host, `ct200`, once served by OpenSSH and once as the demo serves it."""
    with serving(request.param, tmp_path, ["ct200"]) as profile:
        yield profile


@pytest.fixture(params=KINDS)
def two_hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Profile]:
    """A profile with the hosts `ct200` and `ct129`, of either kind of server."""
    with serving(request.param, tmp_path, ["ct200", "ct129"]) as profile:
        yield profile


@pytest.fixture
def openssh(tmp_path: Path) -> Iterator[OpenSSHHost]:
    """One sshd, for tests that change its keys, its log-in shell's files or its state."""
    server = OpenSSHHost(tmp_path, "ct200")
    yield server
    server.close()
