"""RootPolicy: a policy of whole TensorDicts, on the one a TorchRL env carries from step to step.

    env.root ──► the policy writes into it ──► env.step_and_maybe_reset ──► next root, and what was written is in it
                            └──► row.outputs

The same data as from a TensorDictPolicy on columns, less a TensorDict built at every step.
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
    """`policy` acts on the root of `env`, whose own keys are those it has now."""

    policy: TensorDictPolicy
    remembers = True

    def __init__(self, policy: TensorDictPolicy, env: TorchRLRows) -> None:
        super().__init__(policy)
        self.inputs, self._env = (), env
        self._own = {as_key(key) for key in env.root.keys(True, True)}
        self._not_ours = self._own - policy.outputs.keys()
        self._seen = env.root  # what the policy saw and wrote last

    def act(self, row: Row) -> None:
        self._seen = root = self._env.root
        out = self.policy.call(root)
        if out is None or out is root:
            values = self.policy.taken(root)
        else:  # another one: the env goes on with its own
            values = self.policy.taken(out)
            root.update(out.exclude(*self._not_ours))
        self.policy.write(values, row)
        self._env.decided = True

    def forget(self, lanes: Sequence[int]) -> None:
        """Drop what the policy wrote where all lanes begin anew. Where some go on, TorchRL has seen to the others."""
        if len(lanes) < self._env.spec.lanes:
            return
        root = self._env.root
        for key in map(as_key, list(self._seen.keys(True, True))):
            if key not in self._own and key[0] != "next" and key in root.keys(True, True):
                del root[key]
