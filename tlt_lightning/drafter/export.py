"""Write a head as a directory that vLLM serves as it is, with a README about its quality."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt_lightning.drafter.architectures.base import Head
from tlt_lightning.drafter.quality import AcceptanceRule, DraftQuality

log = logging.getLogger(__name__)

_README = Path(__file__).with_name("head_readme.md").read_text()

FILES = ("model.safetensors", "config.json", "config.py", "README.md")
"""Names the files that `write_head` leaves in a directory."""

_TABLE = """On {num_steps} engine steps of held-out text of its target, retraced with {rule}:
**{length:.2f} tokens per step** with {num_draft_tokens} drafted (1 without drafting, {best} at best).

| drafted token | accepted, with all before it | likeliest token agrees | among the three likeliest |
|---|---|---|---|
{rows}
"""


def write_head(
    head: Head,
    tensors: Iterable[tuple[str, Tensor]],
    path: str | Path,
    quality: DraftQuality | None,
    rule: AcceptanceRule,
) -> Path:
    """Write a head's configuration, `tensors`, vocabulary maps and README to directory `path`.

    Without the target's embedding, and its output head where the head drafts its whole vocabulary, vLLM shares the
    target's own, however far that has been trained. Weights are written in the target's type. `rule` is the one that
    `quality` was measured for.
    """
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    dtype: Any = head.config.dtype
    saved = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in tensors}
    if head.d2t is not None and head.t2d is not None:
        saved |= {"d2t": head.d2t.cpu(), "t2d": head.t2d.cpu()}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    head.config.architectures = [type(head).__name__]
    head.config.save_pretrained(folder)
    (folder / "README.md").write_text(_readme(head, quality, rule))
    log.info("Wrote the drafter to %s", folder)
    return folder


def _readme(head: Head, quality: DraftQuality | None, rule: AcceptanceRule) -> str:
    settings: Any = head.config.speculators_config
    whole = head.d2t is None
    size = head.config.draft_vocab_size
    return _README.format(
        method=settings.algorithm,
        target=settings.verifier.name_or_path,
        num_draft_tokens=settings.proposal_methods[0].speculative_tokens,
        layer_ids=", ".join(map(str, head.target_layer_ids)),
        vocabulary="its whole vocabulary" if whole else f"{size} of its {head.verifier_vocab_size} tokens",
        head=" and output head" if whole else "",
        acceptance="Not measured." if quality is None else _table(quality, rule),
    )


def _table(quality: DraftQuality, rule: AcceptanceRule) -> str:
    columns = zip(quality.accepted, quality.top1, quality.top3, strict=True)
    rows = [f"| {k} | {a:.1%} | {top1:.1%} | {top3:.1%} |" for k, (a, top1, top3) in enumerate(columns, start=1)]
    return _TABLE.format(
        num_steps=quality.num_steps,
        rule=rule.in_words(),
        length=quality.acceptance_length,
        num_draft_tokens=len(quality.accepted),
        best=len(quality.accepted) + 1,
        rows="\n".join(rows),
    )
