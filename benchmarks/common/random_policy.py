"""Write policies of random weights from their configurations alone, as fast as the disk takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.arguments import ASSETS
from tlt_lightning.policy import load_tokenizer, policy_shapes

Shapes = Mapping[str, tuple[int, ...]]
BLOCK = 2**26
"""Random numbers of which all tensors are made, each from another place on, over and over."""
FILE_BYTES = 2 * 2**30


def write_random(shape: dict[str, Any], path: str) -> None:
    """Write a policy of a configuration in bfloat16, with the quickstart's tokenizer, unless there is one.

    Others see it when it is whole.
    """
    if Path(path, "config.json").exists():
        return
    folder = Path(f"{path}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    load_tokenizer(str(ASSETS / "policy")).save_pretrained(folder)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    files = list(divided(policy_shapes(str(folder))))
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name, shapes: write_tensors(folder / name, shapes, block), names, files))
    index = {tensor: name for name, shapes in zip(names, files, strict=True) for tensor in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    folder.rename(path)


def divided(shapes: Shapes) -> Iterator[dict[str, tuple[int, ...]]]:
    """Divide tensors among files of at most `FILE_BYTES`, but for tensors that are larger alone."""
    part: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if part and 2 * sum(map(prod, (*part.values(), shape))) > FILE_BYTES:
            yield part
            part = {}
        part[name] = shape
    yield part


def write_tensors(path: Path, shapes: Shapes, block: torch.Tensor) -> None:
    """Write a file of safetensors: norms of ones, and all else from the block, which no other copy is made of."""
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            if "norm" in name:
                file.write(_bytes(torch.ones(shape, dtype=torch.bfloat16)))
                continue
            start, left = hash_of(name) % block.numel(), prod(shape)
            while left:
                part = block[start : start + left]
                file.write(_bytes(part))
                start, left = 0, left - part.numel()


def hash_of(name: str) -> int:
    """Return a number of a name, the same in every process."""
    return sum(byte * 31**place for place, byte in enumerate(name.encode()))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
