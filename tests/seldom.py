"""Tests that take long and hardly ever fail alone: `make test-all` runs them, `make test` their shorter relatives.

Each is told by where its name begins. What stands beside it in `make test` is told in the comment.
"""

SELDOM = (
    # An actor is an interpreter that Ray starts: one dead, one sync, one paused, one nested is enough here.
    "backends/test_ray.py::test_a_dead_actor_is_replaced[False]",
    "backends/test_ray.py::test_pause_returns_when_nothing_is_under_way[actor]",
    "backends/test_ray.py::test_an_error_does_not_wait_for_others_to_close[slow]",
    "backends/test_ray.py::test_a_team_inside[sync]",
    "backends/test_ray.py::test_an_evaluation_in_an_actor",
    "backends/test_ray.py::test_a_strategy_of_ones_own",
    "faults/test_ray_cluster.py::test_one_that_runs",
    "examples/test_examples.py::test_ray_ppo",  # docs/ray.md runs
    # Whole programs: the others of their kind run.
    "examples/test_examples.py::test_learning_from_a_buffer_runs_on_a_small_budget[distributed_sac.py",
    "examples/test_examples.py::test_learning_from_a_buffer_runs_on_a_small_budget[sac_pendulum.py",
    "faults/test_parent.py::test_no_main_guard[interactive-spawn]",
    "faults/test_parent.py::test_the_parent_is_killed[fork-9]",
    "faults/test_programs.py::test_shared_memory_an_env_made_is_unlinked_in_the_end[kill-6]",
    "faults/test_programs.py::test_a_signal_to_the_group_closes_envs_and_ends_their_programs[15-flat]",
    "faults/test_launchers.py::test_delayed_jobs",  # jobs of submitit that are not delayed do
    "faults/test_fork_server.py::test_a_fork_that_fails_is_told_and_leaves_other_collectors_alone",
    "faults/test_soak.py::test_some_faults",  # each fault has a test of its own
    "interop/test_compat.py::test_a_script_chooses_the_start_method_itself",
    "interop/test_compat.py::test_a_module_of_a_package_and_the_processes_it_spawns",
    "interop/test_torchrl_training.py::test_dqn",  # PPO, and recurrent DQN, do
    "buffers/test_full_disk.py::test_a_worker_that_writes_first_says_so",
    "buffers/test_full_disk.py::test_memory_that_processes_share_does_not_lie_in_dev_shm",
    "buffers/test_dumps.py::test_on_a_full_disk_the_dump_before_is_whole",
    "envs/test_ids.py::test_an_entry_point_in_the_main_module",
    # Compiled by JAX: each of its kinds of env is stepped in another test.
    "envs/test_jax.py::test_seeds_reproduce_and_lanes_differ",
    "envs/test_jax.py::test_the_predictable_world[OldGymnax]",
    "envs/test_jax.py::test_given_as_it_is",
    "envs/test_jax.py::test_cartpole_follows_a_loop_by_hand[500]",
    # One more combination.
    "interop/test_parallel_envs.py::test_lanes_of_lanes_are_the_same_as_torchrls[parallel inside]",
    "interop/test_parallel_envs.py::test_the_same_as_torchrls[CartPole-v1-bare-{}]",
    "interop/test_parallel_envs.py::test_the_same_as_torchrls[CartPole-v1-lanes, inside-{}]",
    "interop/test_parallel_envs.py::test_seeds_are_torchrls[1]",
    "interop/test_captured_envs.py::test_an_atari_script[1]",
    "backends/test_stats.py::test_the_window_is_of_all_workers[{'collector_class': 'sync'",
    "backends/test_stats.py::test_the_same_keys_from_the_beginning_to_after_the_end[gloo with processes]",
    "backends/test_weight_strategies.py::test_workers_of_their_own_for_each_station",
)
