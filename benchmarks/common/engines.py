"""Engines to measure with: they write on after an end where lengths are told, and may hold weights that nobody sent."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from tlt_lightning.engine import Sampling, VLLMEngine


class Enough(Exception):
    """Ends a rollout from its progress callback."""


class EndlessEngine(VLLMEngine):
    """An engine that writes on after an end token as long as `ignores_ends` is set."""

    ignores_ends = True

    def _params(self, sampling: Sampling, max_tokens: int | None) -> Any:
        params = super()._params(sampling, max_tokens)
        if self.ignores_ends:
            params.ignore_eos, params.stop_token_ids = True, []
        return params


class UnsyncedEngine(EndlessEngine):
    """The same with the weights that vLLM loaded itself: no policy is attached and none is sent."""

    @override
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        super().setup(policy, max_model_len=max_model_len, seed=seed)
        self._policy_version = 0
