"""check_env: tries out whether an env does what reap needs, and reports each problem as a sentence.

             ┌─ a Gymnasium env: played alone, and beside a copy, with the same seed and actions ─┐
make_env() ──┤                                                                                    ├─► sentences
             └─ any other: collected from, alone and beside a copy; its rows are checked (rows.py) ┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym

from reap._system.messages.pickling import pack
from reap.envs import as_env
from reap.envs.accept import is_env, torch_hint
from reap.envs.adapters.envpool import is_envpool
from reap.errors import ReapError
from reap.testing import generators
from reap.testing.player import SEED, Player
from reap.testing.resets import ResetWatch, layers
from reap.testing.rows import SHARED_STATE, check_rows
from reap.testing.values import equal


def check_env(make_env: Callable[[], Any], *, steps: int = 200) -> list[str]:
    """Try an env, and raise an AssertionError that lists every problem in one sentence each.

    Returns remarks: things that are allowed, but worth knowing. The state of NumPy's, Python's and torch's random
    generators is restored.

    >>> check_env(lambda: gymnasium.make("CartPole-v1"))
    []

    Args:
        make_env: a factory of any kind of env a collector accepts; it is called several times.
        steps: how many steps to play.
    """
    if not callable(make_env) or is_env(make_env):
        raise AssertionError("check_env takes a factory, not a finished env: several copies are needed to compare")
    wrong: list[str] = []
    remarks: list[str] = []
    with generators.kept():
        _check_picklable(make_env, wrong)
        env = _make(make_env, wrong)
        other = None if env is None else _make(make_env, wrong)
        if env is not None and other is not None:
            if _same_object(env, other):
                wrong.append("The factory returned the same env object twice; it must make a new one each time.")
            elif isinstance(env, gym.Env) and not is_envpool(env):
                _check_gymnasium(env, other, make_env, steps, wrong, remarks)
            else:
                check_rows(env, other, make_env, steps, wrong, remarks)
    if wrong:
        raise AssertionError("this env would not give true data:\n" + "\n".join(f"- {sentence}" for sentence in wrong))
    return remarks


def _check_picklable(make_env: Callable[[], Any], wrong: list[str]) -> None:
    try:
        pack(make_env, "it")  # not unpacked: in this process that would change classes that are pickled by value
    except Exception as cause:
        wrong.append(f"The factory cannot be sent to a worker process: pickling it raised {cause!r}.")


def _make(make_env: Callable[[], Any], wrong: list[str]) -> Any:
    try:
        env = make_env()
    except Exception as cause:
        wrong.append(f"The factory raised {cause!r}.")
        return None
    if not is_env(env):
        wrong.append(
            f"The factory returned {type(env).__name__}, which is not an env that reap supports{torch_hint(env)}."
        )
        return None
    return env


def _same_object(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, gym.Env) and one.unwrapped is other.unwrapped)


def _check_gymnasium(
    env: gym.Env[Any, Any],
    other: gym.Env[Any, Any],
    make_env: Callable[[], Any],
    steps: int,
    wrong: list[str],
    remarks: list[str],
) -> None:
    for what in ("observation_space", "action_space"):
        if not isinstance(getattr(env, what, None), gym.Space):
            wrong.append(f"The env has no {what}.")
            return
    generators.scatter(1)
    first = Player(env, wrong, remarks)
    alone = first.play(steps)
    if not wrong:
        generators.scatter(2)  # an env that draws from the global generators will differ
        again = Player(other, [], []).play(steps)
        _check_reproducible(alone, again, wrong)
    if not wrong:
        _check_independence(env, make_env, alone, steps, wrong, remarks)
    for copy in (env, other):
        _check_close(copy, wrong)
    if not wrong:
        _check_accepted(make_env, wrong)


def _check_independence(
    env: gym.Env[Any, Any],
    make_env: Callable[[], Any],
    alone: list[Any],
    steps: int,
    wrong: list[str],
    remarks: list[str],
) -> None:
    """Play a copy in turns with another that has other seeds and actions, and check that it is not affected."""
    one, two = make_env(), make_env()
    watch = ResetWatch(two)
    player, neighbour = Player(one, [], []), Player(two, [], [], seed=SEED + 1)
    moves, others = player.moves(steps), neighbour.moves(steps)
    for _ in moves:
        next(others, None)
    if player.failed or not _same(alone, player.history):
        wrong.append(SHARED_STATE)
    if watch.caught:
        wrong.append(
            "The env resets itself inside step: with its done flag it returns the first observation of the next "
            "episode, and the last one of this episode is lost. Return that one; reap resets."
        )
    if any(isinstance(layer, gym.wrappers.Autoreset) for layer in layers(env)):
        remarks.append("The Autoreset wrapper is not needed: reap resets when an episode ends.")
    for copy in (one, two):
        _check_close(copy, wrong)


def _check_reproducible(first: list[Any], again: list[Any], wrong: list[str]) -> None:
    if len(first) != len(again):
        wrong.append(f"Two copies with the same seed ({SEED}) and actions had episodes of different length.")
        return
    for t, (a, b) in enumerate(zip(first, again)):
        if not equal(a, b):
            what = "first observation" if t == 0 else f"step {t}"
            wrong.append(
                f"Two copies with the same seed ({SEED}) and actions differ at the {what}: seed every random draw."
            )
            return


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(equal, one, other))


def _check_close(env: gym.Env[Any, Any], wrong: list[str]) -> None:
    for time in ("once", "twice"):
        try:
            env.close()
        except Exception as cause:
            sentence = f"close, called {time}, raised {cause!r}."
            wrong += [] if sentence in wrong else [sentence]
            return


def _check_accepted(make_env: Callable[[], Any], wrong: list[str]) -> None:
    try:
        as_env(make_env).close()
    except ReapError as cause:
        wrong.append(f"reap cannot adapt it: {cause}.")
