"""Structure of a 5 GB checkpoint: time and memory of `dflash-engine inspect`, as `python -m benchmarks.inspect`.

The file has a real header over 5 GB of bytes that were never written (a sparse file): what is measured is that nobody
reads them. `--deep` over a dense 1 GB file shows that its memory does not go with the size. The last line is JSON.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dflash_engine.drafter.config import DrafterConfig
from dflash_engine.drafter.documents import zlab_document
from dflash_engine.drafter.tensors import expected_tensors

RUNS = 5
TIME_BAR_S = 1.0
MEMORY_BAR_MB = 200.0


def make(folder: Path, layers: int, *, dense: bool) -> int:
    """A drafter of a 27B target's width; returns the bytes of its weights."""
    config = DrafterConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=262144,
        vocab_size=248320,
        block_size=16,
        mask_token_id=248319,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        target_hidden_size=5120,
    )
    header: dict[str, object] = {}
    at = 0
    for name, shape in expected_tensors(config).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(zlab_document(config, "bfloat16")))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        if dense:
            chunk = b"\x12\x3f" * (8 << 20)
            for start in range(0, at, len(chunk)):
                file.write(chunk[: at - start])
        else:
            file.truncate(8 + len(raw) + at)
    return at


def inspect(folder: Path, *more: str) -> tuple[float, float]:
    """(wall seconds, peak megabytes) of one inspection in a process of its own."""
    code = (
        "import resource, sys; from dflash_engine.cli import main\n"
        f"code = main(['inspect', {str(folder)!r}, '--json', *{list(more)!r}])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return time.perf_counter() - began, int(done.stderr.split()[-1]) / 1024


def main() -> int:
    """Measure and print; returns the exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        size = make(Path(scratch) / "large", 8, dense=False)
        runs = [inspect(Path(scratch) / "large") for _ in range(RUNS)]
        deep_size = make(Path(scratch) / "dense", 1, dense=True)
        deep_s, deep_mb = inspect(Path(scratch) / "dense", "--deep")
    seconds, memory = statistics.median(run[0] for run in runs), max(run[1] for run in runs)
    print(f"{size / 1e9:.2f} GB: {min(r[0] for r in runs):.2f} to {max(r[0] for r in runs):.2f} s, {memory:.0f} MB")
    print(f"--deep of {deep_size / 1e9:.2f} GB: {deep_s:.2f} s, {deep_mb:.0f} MB")
    rows = [
        ("inspect 5 GB, time", seconds, "s", TIME_BAR_S),
        ("inspect 5 GB, memory", memory, "MB", MEMORY_BAR_MB),
        ("inspect --deep, memory", deep_mb, "MB", MEMORY_BAR_MB),
    ]
    found = [
        {"name": name, "measured": round(value, 3), "unit": unit, "bar": bar, "holds": value < bar}
        for name, value, unit, bar in rows
    ]
    print(json.dumps(found))
    return 0 if all(row["holds"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
