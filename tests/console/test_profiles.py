from __future__ import annotations

from pathlib import Path

import pytest

from dflash_console.core.errors import ProfileError, UnknownHostError
from dflash_console.core.profiles import host_of, load_profile, profile_search, shipped_profiles_dir

MINIMAL = '[hosts.ct200]\naddress = "ct200.example"\n'


def written(folder: Path, text: str, name: str = "lab") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def test_the_shipped_example_has_a_training_and_an_evaluating_host() -> None:
    profile = load_profile("lab", [shipped_profiles_dir()])
    assert profile.hosts["ct200"].roles == ("train",)
    assert profile.hosts["ct200"].target_gpus == (0, 1, 2, 3, 4)
    assert profile.hosts["ct200"].drafter_gpus == (5, 6, 7)
    assert profile.hosts["ct129"].roles == ("evaluate",)
    assert all(path.is_file() for path in (*profile.prompts.values(), *profile.recipes.values()))


def test_the_users_own_profile_comes_before_the_shipped_one_of_the_same_name(operator_home: Path) -> None:
    own = written(operator_home / ".config/dflash-ops/profiles", MINIMAL)
    assert load_profile("lab", profile_search()).path == own


def test_a_profile_can_be_named_by_its_path(tmp_path: Path) -> None:
    path = written(tmp_path / "some where", MINIMAL, "x")
    profile = load_profile(str(path), [])
    assert (profile.name, profile.path) == (str(path), path)


def test_paths_in_a_profile_are_relative_to_its_file(tmp_path: Path, operator_home: Path) -> None:
    path = written(
        tmp_path,
        MINIMAL + 'identity = "keys/id"\nknown_hosts = "~/kh"\n[prompts]\na = "p/a.jsonl"\n[recipes]\nr = "/r.toml"\n',
    )
    profile = load_profile(str(path), [])
    assert profile.hosts["ct200"].identity == str(tmp_path / "keys/id")
    assert profile.hosts["ct200"].known_hosts_path() == operator_home / "kh"
    assert profile.prompts == {"a": tmp_path / "p/a.jsonl"}
    assert profile.recipes == {"r": Path("/r.toml")}


def test_a_host_needs_only_its_address(tmp_path: Path, operator_home: Path) -> None:
    host = load_profile(str(written(tmp_path, MINIMAL)), []).hosts["ct200"]
    assert (host.name, host.port, host.user, host.identity) == ("ct200", None, None, None)
    assert (host.state, host.python) == ("~/dflash", "python3")
    assert host.known_hosts_path() == operator_home / ".ssh/known_hosts"


def test_an_unknown_profile_says_which_there_are(tmp_path: Path) -> None:
    written(tmp_path, MINIMAL, "one")
    with pytest.raises(ProfileError, match=r"no profile 'two'; known: one\. Looked in ") as caught:
        load_profile("two", [tmp_path])
    assert caught.value.exit_code == 3


def test_a_profiles_name_cannot_leave_the_search_folders(tmp_path: Path) -> None:
    written(tmp_path, MINIMAL, "secret")
    with pytest.raises(ProfileError):
        load_profile("..", [tmp_path / "profiles"])


@pytest.mark.parametrize(
    ("text", "table", "key", "advice"),
    [
        (MINIMAL + "[evalute]\n", "the top level", "evalute", "did you mean 'evaluate'?"),
        (MINIMAL + 'adress = "x"\n', "[hosts.ct200]", "adress", "did you mean 'address'?"),
        (MINIMAL + 'name = "x"\n', "[hosts.ct200]", "name", "known: address,"),
        (MINIMAL + "[evaluate]\nmax_tokens = 3\n", "[evaluate]", "max_tokens", "did you mean 'max_new_tokens'?"),
        (MINIMAL + "[evaluate]\nzzz = 3\n", "[evaluate]", "zzz", "known: target, prompts,"),
    ],
)
def test_an_unknown_key_is_named_with_file_table_and_the_nearest_known_one(
    tmp_path: Path, text: str, table: str, key: str, advice: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ProfileError) as caught:
        load_profile(str(path), [])
    assert str(caught.value).startswith(f"{path}: {table} has an unknown key {key!r}; {advice}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("= 3", "is not TOML"),
        ("[hosts]\n", "[hosts] names no host"),
        ("x = 1\n", "unknown key 'x'"),
        ("[hosts.ct200]\n", "[hosts.ct200]: Object missing required field `address`"),
        ('[hosts."../ct"]\naddress = "a"\n', "[hosts.../ct] is no host name"),
        ('[hosts."\\u001b[2J"]\naddress = "a"\n', "[hosts.\\x1b[2J] is no host name"),
        ('[hosts.a]\naddress = "-oProxyCommand=x"\n', "address is '-oProxyCommand=x'"),
        (MINIMAL + 'port = "22"\n', "[hosts.ct200] port: Expected `int | null`, got `str`"),
        (MINIMAL + "port = 70000\n", "port is 70000, expected 1 to 65535"),
        (MINIMAL + 'user = "a b"\n', "user is 'a b'"),
        (MINIMAL + 'state = "dflash"\n', "state is 'dflash', expected an absolute path"),
        (MINIMAL + 'state = "~/../x"\n', "state is '~/../x'"),
        (MINIMAL + "connect_timeout_s = 0\n", "connect_timeout_s is 0"),
        (MINIMAL + 'roles = ["serve"]\n', "[hosts.ct200] roles[0]: Invalid enum value 'serve'"),
        (MINIMAL + "target_gpus = [0]\ndrafter_gpus = [0]\n", "name a GPU twice"),
        (MINIMAL + '[hosts.ct200.env]\n"A B" = "x"\n', "env has 'A B'"),
        (MINIMAL + '[hosts.ct200.targets]\nq = "models/q"\n', "target 'q' is 'models/q'"),
        (MINIMAL + '[evaluate]\nprompts = ["x"]\n', "[evaluate] prompts names 'x', which [prompts] does not have"),
        (MINIMAL + "[evaluate]\nmax_new_tokens = 1\n", "max_new_tokens is 1, expected at least 2"),
        (MINIMAL + '[evaluate]\ndtype = "int3"\n', "[evaluate] dtype: Invalid enum value 'int3'"),
    ],
)
def test_an_unusable_value_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ProfileError) as caught:
        load_profile(str(path), [])
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_host_says_which_there_are(tmp_path: Path) -> None:
    profile = load_profile(str(written(tmp_path, MINIMAL)), [])
    with pytest.raises(UnknownHostError, match=r"no host 'ct100'; it has: ct200\.") as caught:
        host_of(profile, "ct100")
    assert caught.value.exit_code == 4
