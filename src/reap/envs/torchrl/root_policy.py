"""RootPolicy: runs a policy directly on the TensorDict that a TorchRL env carries from step to step.

    env.root ──► the policy writes into it ──► env.step_and_maybe_reset ──► next root, which still holds the outputs
                            └──► row.outputs

The data are the same as from a TensorDictPolicy on columns, without building a TensorDict at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reap.core.policy import PolicyWrapper, TensorDictPolicy
from reap.core.slot import Row
from reap.spec import as_key

if TYPE_CHECKING:
    from reap.envs.torchrl.rows import TorchRLRows


class RootPolicy(PolicyWrapper):
    """Runs `policy` on the root of `env`; the keys that the root has now are the env's own."""

    policy: TensorDictPolicy
    remembers = True

    def __init__(self, policy: TensorDictPolicy, env: TorchRLRows) -> None:
        super().__init__(policy)
        self.inputs, self._env = (), env
        self._own = {as_key(key) for key in env.root.keys(True, True)}
        self._not_ours = self._own - policy.outputs.keys()
        self._seen = env.root  # the TensorDict that the policy saw and wrote last

    def act(self, row: Row) -> None:
        self._seen = root = self._env.root
        out = self.policy.call(root)
        if out is None or out is root:
            values = self.policy.taken(root)
        else:  # a new TensorDict: its outputs are copied into the env's own
            values = self.policy.taken(out)
            root.update(out.exclude(*self._not_ours))
        self.policy.write(values, row)
        self._env.decided = True

    def forget(self, lanes: Sequence[int]) -> None:
        """Remove what the policy wrote if all lanes are reset. If only some are, TorchRL has taken care of them."""
        if len(lanes) < self._env.spec.lanes:
            return
        root = self._env.root
        for key in map(as_key, list(self._seen.keys(True, True))):
            if key not in self._own and key[0] != "next" and key in root.keys(True, True):
                del root[key]
