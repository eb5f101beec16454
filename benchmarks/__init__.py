"""How fast reap is: one table of workloads × systems, one runner.

    python -m benchmarks                     the scoreboard (`make bench`), at most six minutes
    python -m benchmarks --all               everything, with peers (`make bench-all`)
    python -m benchmarks --only atari        workloads whose group or name holds this
    python -m benchmarks --list              what there is
    python -m benchmarks.report              docs/benchmarks.md and its charts, from benchmarks/results/*.json

`catalogue.py` is the table. Each of its modules holds workloads: the env and the policy as TorchRL's collector and
reap's take them, and the loop that an expert would write by hand for just this case, in inference mode.
"""
