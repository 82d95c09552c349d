"""The target: loading, capture, greedy decoding, conversion; against transformers itself without cache or padding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from dflash_engine.errors import DataError, TargetError
from dflash_engine.target.capture import capture, check_layer_ids
from dflash_engine.target.gguf import convert_gguf, main
from dflash_engine.target.greedy import Completion, greedy_decode
from dflash_engine.target.load import Target, load_target
from dflash_engine.target.tokens import load_tokens
from tests.models import END, VOCAB_SIZE, make_target

KINDS = ("qwen3", "llama")
PROMPTS = [
    [{"role": "user", "content": text}]
    for text in ("a", "hello there", "the rain in the plain " * 4, "hello where", "long " * 40, "x y z")
]


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(
        make_target(tmp_path_factory.mktemp(request.param) / "target", request.param), dtype=torch.float32
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("made") / "target")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "target"))


def _prompts(target: Target) -> list[list[int]]:
    return [target.tokens.render(messages, True) for messages in PROMPTS]


def _plain_greedy(target: Target, prompt: list[int], length: int) -> list[int]:
    """One prompt, the whole text anew for every token: no cache, no padding, no batch, no stop."""
    new: list[int] = []
    while len(new) < length:
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([prompt + new]), use_cache=False).logits
        new.append(int(logits[0, -1].argmax()))
    return new


def _cut(tokens: Sequence[int], stop_ids: Sequence[int]) -> Completion:
    end = next((i for i, token in enumerate(tokens, start=1) if token in stop_ids), None)
    return Completion(tuple(tokens), "length") if end is None else Completion(tuple(tokens[:end]), "stop")


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    """What the target says to each of PROMPTS, 16 tokens long."""
    return [_plain_greedy(target, prompt, 16) for prompt in _prompts(target)]


def _ignore(done: int, total: int) -> None:
    pass


def _with_stop_ids(target: Target, stop_ids: tuple[int, ...]) -> Target:
    return Target(target.folder, target.model, type(target.tokens)(target.tokens.tokenizer, stop_ids))


def test_a_tap_is_the_output_of_the_block_with_that_index(target: Target) -> None:
    ids = torch.tensor([_prompts(target)[2]])
    with torch.no_grad():
        states = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    taps = capture(target, ids, torch.tensor([ids.shape[1]]), [4, 0, 3])
    assert torch.equal(taps, torch.cat([states[5], states[1], states[4]], dim=-1))


def test_a_padded_row_has_the_states_of_the_same_row_alone_and_zeros_behind(target: Target) -> None:
    prompts = _prompts(target)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.full((len(prompts), int(lengths.max()) + 3), 7)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    together = capture(target, ids, lengths, [1, 3])
    for row, prompt in enumerate(prompts):
        alone = capture(target, torch.tensor([prompt]), torch.tensor([len(prompt)]), [1, 3])[0]
        torch.testing.assert_close(together[row, : len(prompt)], alone, atol=1e-5, rtol=1e-5)
        assert not together[row, len(prompt) :].any()


def test_capture_stops_behind_the_last_tapped_block_and_leaves_the_target_as_it_was(target: Target) -> None:
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = target.model(input_ids=ids, output_hidden_states=True)
    hooks = [len(block._forward_hooks) for block in target.layers]
    ran: list[int] = []
    handles = [
        block.register_forward_pre_hook(lambda module, arguments, i=i: ran.append(i))
        for i, block in enumerate(target.layers)
    ]
    try:
        capture(target, ids, torch.tensor([3]), [2, 0])
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [0, 1, 2]
    assert [len(block._forward_hooks) for block in target.layers] == hooks
    with torch.no_grad():
        after = target.model(input_ids=ids, output_hidden_states=True)
    assert torch.equal(after.logits, before.logits)
    assert len(after.hidden_states) == len(before.hidden_states)


@pytest.mark.parametrize("layer_ids", [[], [-1], [6], [5], [1, 5]])
def test_layers_that_cannot_be_tapped_are_refused_the_last_one_included(layer_ids: list[int]) -> None:
    with pytest.raises(TargetError, match=r"expected ids within 0\.\.4"):
        check_layer_ids(layer_ids, 6)


def test_greedy_decoding_equals_plain_recomputation_of_each_prompt_alone(
    target: Target, plain: list[list[int]]
) -> None:
    found = greedy_decode(target, _prompts(target), max_new_tokens=16, progress=_ignore)
    assert found == [_cut(tokens, target.stop_ids) for tokens in plain]


def test_a_completion_ends_with_the_first_of_several_stop_tokens_and_others_go_on(
    target: Target, plain: list[list[int]]
) -> None:
    stop_ids = (plain[0][0], plain[1][6], plain[2][11])
    found = greedy_decode(_with_stop_ids(target, stop_ids), _prompts(target), max_new_tokens=16, progress=_ignore)
    assert found == [_cut(tokens, stop_ids) for tokens in plain]
    assert {completion.finish for completion in found} == {"stop", "length"}
    assert len(found[0].tokens) == 1


def test_a_stop_token_at_the_limit_is_a_stop(target: Target) -> None:
    prompt = _prompts(target)[0]
    (free,) = greedy_decode(target, [prompt], max_new_tokens=1, progress=_ignore)
    (found,) = greedy_decode(_with_stop_ids(target, free.tokens), [prompt], max_new_tokens=1, progress=_ignore)
    assert (free.finish, found) == ("length", Completion(free.tokens, "stop"))


def test_more_prompts_than_a_batch_holds_keep_their_order(target: Target) -> None:
    prompts = [[*prompt, extra] for extra in range(12) for prompt in _prompts(target)]
    found = greedy_decode(target, prompts, max_new_tokens=3, progress=_ignore)
    assert len(prompts) > 64
    assert found[::7] == [_cut(_plain_greedy(target, prompt, 3), target.stop_ids) for prompt in prompts[::7]]


def test_equal_logits_go_to_the_lowest_id(target: Target) -> None:
    hidden = torch.zeros(2, 3, target.hidden_size)
    best, ids = target.greedy(hidden)
    assert best.shape == ids.shape == (2, 3)
    assert not ids.any()


def test_the_greedy_id_is_the_heads_largest_logit(target: Target) -> None:
    hidden = torch.randn(2, 3, target.hidden_size, generator=torch.Generator().manual_seed(1))
    best, ids = target.greedy(hidden)
    expected, expected_ids = target.head(hidden).max(dim=-1)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(best, expected)


def test_progress_rises_to_the_whole(target: Target) -> None:
    seen: list[tuple[int, int]] = []
    greedy_decode(target, _prompts(target), max_new_tokens=5, progress=lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == (30, 30)


@pytest.mark.parametrize(
    ("prompts", "new", "says"),
    [
        ([[1], []], 4, "prompt 2 has 0 tokens"),
        ([[1] * 1021], 4, "prompt 1 has 1021 tokens; expected 1 to 1020"),
        ([[VOCAB_SIZE]], 4, "prompt 1 has token ids outside"),
        ([[1]], 0, "at most 0 new tokens"),
    ],
)
def test_prompts_that_cannot_be_completed_are_refused(
    target: Target, prompts: list[list[int]], new: int, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        greedy_decode(target, prompts, max_new_tokens=new, progress=_ignore)


def test_logits_that_are_not_finite_are_an_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(TargetError, match="not finite"):
        greedy_decode(load_target(folder, dtype=torch.float32), [[1, 2]], max_new_tokens=2, progress=_ignore)


def test_a_loaded_target_is_frozen_in_evaluation_mode_and_of_the_asked_type(folder: Path) -> None:
    loaded = load_target(folder, dtype=torch.bfloat16)
    assert not loaded.model.training
    assert {(p.dtype, p.requires_grad) for p in loaded.model.parameters()} == {(torch.bfloat16, False)}
    assert (loaded.num_layers, loaded.hidden_size, loaded.stop_ids) == (6, 64, (END,))
    assert loaded.embed(torch.tensor([[1, 2]])).shape == (1, 2, 64)


def test_stop_ids_come_from_every_configuration_and_may_be_lists(folder: Path) -> None:
    generation = json.loads((folder / "generation_config.json").read_bytes())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [5, 9]}))
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 11}))
    assert load_tokens(folder).stop_ids == (5, 9, 11, END)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: shutil.rmtree(d), "is not there"),
        (lambda d: (d / "config.json").write_text("{"), "cannot be"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer cannot be loaded"),
        (lambda d: (d / "chat_template.jinja").unlink(), "no chat template"),
        (lambda d: (d / "model.safetensors").write_bytes(b"junk"), "cannot be loaded"),
    ],
)
def test_a_target_that_is_missing_or_damaged_is_named(
    folder: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(folder)
    with pytest.raises(TargetError, match=says) as error:
        load_target(folder, dtype=torch.float32)
    assert str(folder) in str(error.value)


def _write_gguf(source: Path, out: Path) -> None:
    """The Llama target in a GGUF file, float32, with a byte-level tokenizer, as llama.cpp's converter lays it out."""
    model = LlamaForCausalLM.from_pretrained(source)
    config = model.config
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    document = json.loads((source / "tokenizer.json").read_bytes())
    vocabulary = document["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([3 if 256 <= i <= 258 else 1 for i in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(256)
    writer.add_chat_template((source / "chat_template.jinja").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        array = tensor.numpy()
        if heads is not None:  # llama.cpp interleaves the two halves that RoPE pairs
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        key = names.get_name(name, try_suffixes=(".weight",))
        assert key is not None, name
        writer.add_tensor(key, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_gguf_says_what_its_source_says(tmp_path: Path) -> None:
    source = make_target(tmp_path / "source", "llama", layers=2)
    file = tmp_path / "tiny.gguf"
    _write_gguf(source, file)
    out = tmp_path / "out"
    phrases: list[str] = []
    convert_gguf(file, out, phrases.append)
    assert phrases[0].startswith("reading tiny.gguf")
    assert phrases[-1] == f"done: {out}"
    original, converted = (load_target(folder, dtype=torch.float32) for folder in (source, out))
    assert _prompts(converted) == _prompts(original)
    assert converted.stop_ids == original.stop_ids
    decoded = [greedy_decode(t, _prompts(t), max_new_tokens=12, progress=_ignore) for t in (original, converted)]
    assert decoded[0] == decoded[1]
    config = json.loads((out / "config.json").read_bytes())
    assert not config.keys() & {"quantization_config", "_name_or_path", "_model_name_or_path"}
    assert not list(tmp_path.glob("*.partial-*"))


def test_a_folder_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    phrases: list[str] = []
    convert_gguf(tmp_path / "nothing.gguf", tmp_path / "out", phrases.append)
    assert phrases == [f"{tmp_path / 'out'} exists already"]


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read: No such file"), (b"PK\x03\x04", "is no GGUF file"), (b"GGUF\x03", "cannot be converted")],
)
def test_a_file_that_cannot_be_converted_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, says: str
) -> None:
    file = tmp_path / "bad.gguf"
    if content is not None:
        file.write_bytes(content)
    assert main(["gguf", str(file), str(tmp_path / "out")]) == TargetError.exit_code
    error = capsys.readouterr().err
    assert says in error
    assert error.splitlines()[-1].startswith("dflash-engine: error: ")
    assert "Traceback" not in error
    assert {path.name for path in tmp_path.iterdir()} <= {"bad.gguf", "operator"}


@pytest.mark.parametrize(
    "text", ["plain", "two  spaces\n\tand lines", "emoji 🙂🙃 and ümläut", "日本語", "<|im_end|>", "", "🙂"]
)
def test_pieces_of_tokens_are_together_the_decoded_text(text: str, tmp_path: Path) -> None:
    tokens = load_tokens(make_target(tmp_path / "target"))
    ids = tokens.tokenizer(text)["input_ids"]
    pieces = tokens.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokens.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert not any("\ufffd" in piece for piece in pieces)
