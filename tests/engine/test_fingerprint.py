"""Fingerprints: what changes them, what does not, and what a damaged file is told as."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dflash_engine.errors import TargetError
from dflash_engine.fingerprint import main, model_fingerprint, read_header, tokenizer_fingerprint
from tests.models import make_target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("fingerprint") / "target", layers=3)


@pytest.fixture
def target(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "target"))


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return model_fingerprint(folder)


def test_sharding_and_file_names_do_not_change_a_models_fingerprint(made: Path, tmp_path: Path) -> None:
    sharded = make_target(tmp_path / "sharded", layers=3, shard_bytes=150_000)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert model_fingerprint(sharded) == model_fingerprint(made)


def test_the_order_of_tensors_in_the_file_does_not_change_it(target: Path) -> None:
    before = model_fingerprint(target)

    def reversed_with_another_metadata(tensors: dict[str, torch.Tensor]) -> None:
        save_file(dict(reversed(tensors.items())), target / "model.safetensors", metadata={"who": "else"})

    path = target / "model.safetensors"
    reversed_with_another_metadata(load_file(path))
    assert model_fingerprint(target) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["model.norm.weight"].add_(1),
        lambda t: t["lm_head.weight"][0, 0].add_(1),
        lambda t: t["lm_head.weight"][-1, -1].add_(1),
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].view(torch.int32)}),
        lambda t: t.update({"renamed": t.pop("model.norm.weight")}),
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()}),
        lambda t: t.pop("model.norm.weight"),
    ],
    ids=["a small tensor", "a first element", "a last element", "a dtype", "a name", "a shape", "a tensor less"],
)
def test_names_shapes_dtypes_and_sampled_values_change_it(
    target: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    before = model_fingerprint(target)
    assert _rewrite(target, change) != before


def test_a_header_gives_the_place_of_every_tensor(target: Path) -> None:
    path = target / "model.safetensors"
    tensors = load_file(path)
    found = read_header(path)
    assert {name: info.shape for name, info in found.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    info = found["model.norm.weight"]
    assert path.read_bytes()[info.begin : info.end] == tensors["model.norm.weight"].numpy().tobytes()


def _with_header(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _entry(**changes: object) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}).encode()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "does not fit its bytes|its header accounts for"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "its header accounts for"),
        (lambda p: p.write_bytes(p.read_bytes()[:100]), "header of .* bytes in a file of 100"),
        (lambda p: p.write_bytes(b"\xff" * 8 + b"{}"), "header of 18446744073709551615 bytes"),
        (lambda p: p.write_bytes(b""), "in a file of 0"),
        (lambda p: _with_header(p, b"not JSON"), "its header is not JSON"),
        (lambda p: _with_header(p, b"[" * 100_000), "its header is not JSON"),
        (lambda p: _with_header(p, b"[1]"), "its header is not an object"),
        (lambda p: _with_header(p, _entry(dtype="F1"), bytes(8)), "entry for 'a' cannot be read"),
        (lambda p: _with_header(p, _entry(shape=[-2, -1]), bytes(8)), "does not fit its bytes"),
        (lambda p: _with_header(p, _entry(shape=[1 << 62]), bytes(8)), "does not fit its bytes"),
        (lambda p: _with_header(p, _entry(data_offsets=[0, 1 << 40]), bytes(8)), "does not fit its bytes"),
        (lambda p: _with_header(p, _entry(data_offsets=[4, 12]), bytes(12)), "begins at byte"),
        (lambda p: p.unlink(), "has no model.safetensors"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(target: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(target / "model.safetensors")
    with pytest.raises(TargetError, match=says) as error:
        model_fingerprint(target)
    assert str(target) in str(error.value)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=200), header=st.booleans())
def test_any_bytes_are_a_file_or_an_error_never_a_crash(tmp_path: Path, data: bytes, header: bool) -> None:
    path = tmp_path / "any.safetensors"
    path.write_bytes((len(data) // 2).to_bytes(8, "little") + data if header else data)
    with contextlib.suppress(TargetError):
        read_header(path)


def test_the_same_tokenizer_in_another_layout_has_the_same_fingerprint(target: Path) -> None:
    before = tokenizer_fingerprint(target)
    path = target / "tokenizer.json"
    document = json.loads(path.read_bytes())
    document["padding"] = {"strategy": "BatchLongest"}
    path.write_text(json.dumps(document, indent=4, sort_keys=True))
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").unlink()
    config = json.loads((target / "tokenizer_config.json").read_bytes())
    (target / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    assert tokenizer_fingerprint(target) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda d: (d / "chat_template.jinja").write_text("{{ messages }}"),
        lambda d: (d / "chat_template.jinja").unlink(),
        lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text().replace("<|mask|>", "<|msk|>")),
    ],
    ids=["another template", "no template", "another token"],
)
def test_tokens_and_template_change_a_tokenizers_fingerprint(target: Path, change: Callable[[Path], object]) -> None:
    before = tokenizer_fingerprint(target)
    change(target)
    assert tokenizer_fingerprint(target) != before


def test_the_command_prints_both_as_json(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(target)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": model_fingerprint(target),
        "tokenizer": tokenizer_fingerprint(target),
    }


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: shutil.rmtree(d), "has no model.safetensors"),
        (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("[1]"), "tokenizer.json does not hold a JSON object"),
        (lambda d: (d / "chat_template.jinja").write_bytes(b"\xff\xfe"), "chat_template.jinja cannot be read"),
    ],
)
def test_the_command_says_in_one_line_what_is_missing(
    target: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], says: str
) -> None:
    damage(target)
    assert main([str(target)]) == TargetError.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dflash-engine: error: ")
    assert err.count("\n") == 1
    assert says in err
