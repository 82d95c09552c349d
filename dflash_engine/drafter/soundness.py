"""What is wrong with a checkpoint's tensors, from names, shapes and dtypes. Importable without torch."""

from __future__ import annotations

import re

from dflash_engine.drafter.config import DrafterConfig
from dflash_engine.drafter.faults import Fault
from dflash_engine.drafter.stored import StoredWeights
from dflash_engine.drafter.tensors import D2T, T2D, expected_tensors

__all__ = ["tensor_faults"]

_DTYPES = ("F32", "BF16", "F16")
_LAYER = re.compile(r"layers\.(\d+)\.")


def tensor_faults(config: DrafterConfig, weights: StoredWeights) -> list[Fault]:
    """Every tensor that is missing, extra, misshapen or of a wrong dtype; a wrong layer count is one fault."""
    found = weights.tensors
    expected = expected_tensors(config, weights.own)
    faults = []
    held = {int(match[1]) for name in found if (match := _LAYER.match(name))}
    wrong_count = bool(held) and held != set(range(config.num_hidden_layers))
    if wrong_count and held == set(range(len(held))):
        message = f"the weights have {len(held)} layers, num_hidden_layers is {config.num_hidden_layers}"
        faults.append(Fault("layer_count_mismatch", message, "num_hidden_layers"))
        expected = {n: s for n, s in expected.items() if not (m := _LAYER.match(n)) or int(m[1]) in held}
        found = {n: t for n, t in found.items() if not (m := _LAYER.match(n)) or int(m[1]) < config.num_hidden_layers}
    faults += [Fault("missing_tensor", f"tensor {n} is missing", n) for n in sorted(expected.keys() - found.keys())]
    faults += [
        Fault("extra_tensor", f"tensor {n} does not belong to this architecture", n)
        for n in sorted(found.keys() - expected.keys())
    ]
    for name, shape in sorted(expected.items()):
        if name not in found or found[name].shape == shape:
            continue
        if name == "fc.weight" and not config.target_layer_ids:
            continue  # that there are no taps is its own fault
        has = list(found[name].shape)
        if name == "fc.weight":
            faults.append(
                Fault(
                    "wrong_fc_width",
                    f"tensor fc.weight has shape {has}, {len(config.target_layer_ids)} tapped layers of width "
                    f"{config.target_hidden_size} imply {list(shape)}",
                    name,
                )
            )
        else:
            message = f"tensor {name} has shape {has}, the configuration implies {list(shape)}"
            faults.append(Fault("wrong_shape", message, name))
    for name, tensor in sorted(found.items()):
        wanted = {D2T: ("I64",), T2D: ("BOOL",)}.get(name, _DTYPES)
        if name in expected and tensor.dtype not in wanted:
            message = f"tensor {name} is {tensor.dtype}, expected {' or '.join(wanted)}"
            faults.append(Fault("wrong_dtype", message, name))
    return faults
