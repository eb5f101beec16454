"""Tests that take long and hardly ever fail alone: `make test-all` runs them, `make test` their shorter relatives.

Each is told by where its name begins; `*` stands for anything. What stands beside it in `make test` is told in the
comment.
"""

from __future__ import annotations

import re

SLOW = (
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
    "interop/test_scripts.py::test_the_same_numbers[tutorial_recurrent_dqn]",  # PPO, SAC and DQN do
    "buffers/test_full_disk.py::test_a_worker_that_writes_first_says_so",
    "buffers/test_full_disk.py::test_without_memory_files_a_full_temporary_directory_is_told",
    "buffers/test_full_disk.py::test_memory_that_processes_share_does_not_lie_in_dev_shm",
    "buffers/test_dumps.py::test_on_a_full_disk_the_dump_before_is_whole",
    "envs/test_ids.py::test_an_entry_point_in_the_main_module",
    # Compiled by JAX: each of its kinds of env is stepped in another test.
    "envs/test_jax.py::test_seeds_reproduce_and_lanes_differ",
    "envs/test_jax.py::test_the_predictable_world[OldGymnax]",
    "envs/test_jax.py::test_given_as_it_is",
    # TorchRL's side of a grid takes most of its time. Each env with the options that change what a rollout holds is
    # there; each transform over lanes; each way to join workers with several lanes.
    "interop/test_grid.py::test_grid[*-stored]",
    "interop/test_grid.py::test_grid[*-no ids]",
    "interop/test_grid.py::test_grid[*-reset each]",
    "interop/test_grid.py::test_grid[*-random]",
    "interop/test_captured_envs.py::test_each_transform[*-one]",
    "interop/test_captured_envs.py::test_each_transform[*-inside]",
    "interop/test_captured_envs.py::test_a_transform_changed_between_batches[*-one]",
    "interop/test_parity_multi.py::test_synchronous[stack]",
    "interop/test_parity_multi.py::test_synchronous[along 0",
    "interop/test_parity_multi.py::test_synchronous[along -1]",
    "interop/test_parity_multi.py::test_synchronous[along 1",
    "interop/test_parity_multi.py::test_synchronous[along -2",
    "interop/test_parity_multi.py::test_synchronous[frames of each, along 0]",
    "interop/test_parity_multi.py::test_synchronous[frames of each, split]",
    "interop/test_parity_multi.py::test_synchronous[split]",
    "interop/test_parity_multi.py::test_synchronous[reset each time]",
    "interop/test_parity_multi.py::test_synchronous[devices]",
    "interop/test_parity_multi.py::test_one_asynchronous_worker[usual]",
    "interop/test_parity_multi.py::test_one_asynchronous_worker[max_frames_per_traj",
    "interop/test_parity_multi.py::test_one_asynchronous_worker[reset_at_each_iter",
    "interop/test_parity_multi.py::test_one_asynchronous_worker[trajs_per_batch traj_format0]",
    "interop/test_parity_multi.py::test_front_door[*backend",
    "interop/test_parity_multi.py::test_one_env_for_several_workers[False]",
    "interop/test_parity_multi.py::test_an_env_that_raises[MultiAsyncCollector]",
    "interop/test_parity_multi.py::test_rounding_is_announced[total_frames",
    "interop/test_parity_multi.py::test_random_frames_come_first[AsyncCollector]",
    "interop/test_parity_multi.py::test_reset[None]",
    "interop/test_parity_multi.py::test_asynchronous_workers_one_by_one[None]",
    "interop/test_parity_multi.py::test_script_of_several_workers",
    "interop/test_parity_multi.py::test_script_of_a_batched_env",
    "interop/test_grid_workers.py::test_workers[MultiSyncCollector-gym with counters-]",
    "interop/test_grid_workers.py::test_workers[AsyncCollector-counters over lanes-]",
    "interop/test_grid_workers.py::test_workers[AsyncCollector-nested-]",
    "interop/test_grid_workers.py::test_text_of_workers_is_of_its_own_batch[tensorclass]",
    "interop/test_contiguous.py::test_workers_joined_in_every_way[one-0]",
    "interop/test_contiguous.py::test_workers_joined_in_every_way[one--1]",
    "interop/test_contiguous.py::test_workers_joined_in_every_way[lanes-0]",
    *(
        f"interop/test_batched_envs.py::test_every_kind_in_threads[{kind}]"
        for kind in ("CartPole", "CartPole with counters", "counters", "counting", "fixed norm", "flattened", "gym")
    ),
    *(
        f"interop/test_batched_envs.py::test_every_kind_in_threads[{kind}]"
        for kind in ("gym lanes", "lanes", "moving norm", "nested", "one lane", "renamed")
    ),
    "interop/test_parallel_envs.py::test_the_same_as_torchrls[CartPole-v1-bare",
    "interop/test_parallel_envs.py::test_the_same_as_torchrls[CartPole-v1-inside-{}]",
    "interop/test_parallel_envs.py::test_the_same_as_torchrls[CartPole-v1-around-{}]",
    "interop/test_parallel_envs.py::test_what_is_left_to_torchrl_and_why[unknown around]",
    "interop/test_parallel_envs.py::test_what_is_left_to_torchrl_and_why[unknown inside, known around]",
    "interop/test_parallel_envs.py::test_the_same_as_torchrls[CartPole-v1-lanes, around-{}]",
    "interop/test_parallel_envs.py::test_lanes_of_lanes_are_the_same_as_torchrls[around]",
    # Every fault, in one process or another, and every process with one fault.
    "faults/test_remote_workers.py::test_in_a_step[DistributedSyncCollector-exit]",
    "faults/test_remote_workers.py::test_in_a_step[RPC*-exit]",
    "faults/test_loading.py::test_a_child_that_cannot_load_what_it_was_given_tells_the_cause[*-ConnectionRefusedError]",
    "faults/test_loading.py::test_a_child_that_cannot_load_what_it_was_given_tells_the_cause[a*-SystemExit]",
    "faults/test_loading.py::test_a_factory_that_raises_what_a_lost_connection_does_is_told[*-EOFError]",
    "background/test_running.py::test_an_error_surfaces_at_the_next_call[is_running-sync]",
    "background/test_running.py::test_an_error_surfaces_at_the_next_call[is_running-ready]",
    "background/test_running.py::test_an_error_surfaces_at_the_next_call[update_policy_weights_-async]",
    "background/test_running.py::test_an_error_surfaces_at_the_next_call[update_policy_weights_-ready]",
    "background/test_running.py::test_an_error_surfaces_at_the_next_call[async_shutdown-sync]",
    "background/test_running.py::test_an_error_surfaces_at_the_next_call[async_shutdown-ready]",
    "background/test_running.py::test_an_error_surfaces_at_the_next_call[state_dict-async]",
    "background/test_running.py::test_an_error_surfaces_at_the_next_call[state_dict-ready]",
    "background/test_running.py::test_a_worker_that_is_stuck_between_two_steps_is_reported[postproc-async]",
    "background/test_running.py::test_a_worker_that_is_stuck_between_two_steps_is_reported[deaf-sync]",
    "background/test_running.py::test_a_worker_that_is_stuck_between_two_steps_is_reported[writing-async]",
    "faults/test_parent.py::test_start_of_many_is_about_that_of_one",  # it measures more than it demands
    # One more combination.
    "backends/test_shared_objects.py::test_what_multiprocessing_makes_works_in_an_env[in_one_worker",
    "backends/test_shared_objects.py::test_what_multiprocessing_makes_works_in_an_env[in_pool-spawn]",
    "backends/test_shared_objects.py::test_what_multiprocessing_makes_works_in_an_env[in_pool-torch]",
    "backends/test_shared_objects.py::test_what_multiprocessing_makes_works_in_an_env[in_threads_of_processes-fork]",
    "backends/test_shared_objects.py::test_what_multiprocessing_makes_works_in_an_env[in_threads_of_processes-torch]",
    "backends/test_shared_objects.py::test_what_multiprocessing_makes_works_in_an_env[in_evaluator-torch]",
    "backends/test_multi.py::test_every_form_of_weights[MultiAsyncCollector-module]",
    "backends/test_multi.py::test_every_form_of_weights[MultiAsyncCollector-TensorDict",
    "backends/test_multi.py::test_every_form_of_weights[MultiSyncCollector-state dict]",
    "backends/test_reset_calls.py::test_random_frames_are_counted_on[1-",
    "backends/test_reset_calls.py::test_random_frames_are_counted_on[4-Multi",
    "background/test_into_buffers.py::test_rows_are_what_happened[split-sync]",
    "background/test_into_buffers.py::test_rows_are_what_happened[steps-async]",
    "background/test_into_buffers.py::test_rows_are_what_happened[grouped-sync]",
    "background/test_into_buffers.py::test_rows_are_what_happened[postproc-async]",
    "buffers/test_replay.py::test_a_thread_that_waits_for_rows_ends_with_the_program[dropped]",
    "interop/test_parallel_envs.py::test_lanes_of_lanes_are_the_same_as_torchrls[parallel inside]",
    "interop/test_parallel_envs.py::test_the_same_as_torchrls[CartPole-v1-lanes, inside-{}]",
    "interop/test_parallel_envs.py::test_seeds_are_torchrls[1]",
    "interop/test_captured_envs.py::test_an_atari_script[1]",
    "backends/test_stats.py::test_the_window_is_of_all_workers[{'collector_class': 'sync'",
    "backends/test_stats.py::test_the_same_keys_from_the_beginning_to_after_the_end[gloo with processes]",
    "backends/test_weight_strategies.py::test_workers_of_their_own_for_each_station",
    # Slow on two cores, and beside a relative that runs.
    "backends/test_ray.py::test_shutdown_in_the_middle_of_a_step",  # gloo and RPC do
    "backends/test_ray.py::test_into_a_buffer_of_this_process_by_the_front_door",  # a buffer of its own does
    "examples/test_examples.py::test_learning_from_a_buffer_runs_on_a_small_budget",  # PPO does, and docs/background.md
    "faults/test_host_process.py::test_a_worker_that_prints_a_lot",
    "faults/test_host_process.py::test_a_fork_of_the_parent_takes_nothing_along[MultiSyncCollector]",
    "faults/test_host_process.py::test_a_frozen_reader_does_not_freeze_us",
    "faults/test_deaths.py::test_in_close[MultiAsyncCollector-deaf]",
    "faults/test_remote_workers.py::test_random_frames_in_collector_kwargs",
    'faults/test_interrupts_ready.py::test_ctrl_c_at_any_moment[env_backend="threading"]',
    "faults/test_launchers.py::test_one_that_takes_no_weights_is_in_the_log_where_there_is_no_timeout",
    "buffers/test_full_disk.py::test_rows_that_do_not_fit_on_the_disk_are_refused_before_the_first_is_written",
    "envs/test_jax.py::test_cartpole_follows_a_loop_by_hand",
    "envs/test_jax.py::test_the_predictable_world[Brax]",
    "interop/test_parallel_envs.py::test_the_same_as_torchrls[CartPole-v1-both-{}]",
    "interop/test_parallel_envs.py::test_an_env_process_that_fails_is_named[die-WorkerDied]",
    "interop/test_compat.py::test_a_configuration_read_by_hydra",
    "backends/test_staleness.py::test_workers_that_are_sent_weights_in_turn",
    # Failures that are survived: each fault, and each way to go on, is in one of the others; who hangs is waited for.
    "backends/test_ray.py::test_an_actor_that_fails_is_replaced_or_left_out[drop]",
    "backends/test_ray.py::test_pause_returns_when_nothing_is_under_way[here]",
    "examples/test_resume_ppo.py::test_killed_twice_it_learns_the_same",  # runs that were killed go on in tests/resume
    "resume/test_envs.py::test_jax",
    "faults/test_restart.py::test_a_worker_that_fails_is_replaced[stop-*]",
    "faults/test_restart.py::test_a_worker_that_fails_is_replaced[hang-MultiAsyncCollector]",
    "faults/test_restart.py::test_a_worker_that_fails_is_left_out[hang-*]",
    "faults/test_restart.py::test_processes_of_a_parallel_env[None-*-hang]",
    "faults/test_restart.py::test_processes_of_a_parallel_env[4-drop-hang]",
    "faults/test_restart.py::test_a_remote_worker_that_lives_on_is_replaced[hang]",
    "faults/test_restart.py::test_a_short_soak[memmap]",
    "faults/test_restart.py::test_a_short_soak[rpc]",
    "faults/test_restart.py::test_remote_workers_of_this_machine[RPCCollector-drop-*]",
    "faults/test_restart_ready.py::test_ctrl_c_while_one_is_replaced[*",
    "faults/test_restart_ready.py::test_a_short_soak[ready]",
    "faults/test_restart_ready.py::test_lanes_of_a_parallel_env_that_come_as_they_are_ready[*-hang]",
    "faults/test_restart_ready.py::test_an_env_that_fails_is_replaced[*stop]",
    "faults/test_restart_ready.py::test_an_env_that_fails_is_replaced[threads of processes-hang]",
    "faults/test_restart_ready.py::test_an_env_that_fails_is_left_out[*hang]",
    "faults/test_restart_ready.py::test_one_that_dies_while_it_is_built_counts[threads of processes]",
    # What limits a run of processes is told from times, which other tests on the same cores change.
    "watching/test_diagnosis.py::test_tiny_batches[Multi*",
    "watching/test_diagnosis.py::test_a_slow_learner[Multi*",
    "watching/test_diagnosis.py::test_a_slow_env[Multi*",
    "watching/test_diagnosis.py::test_a_slow_policy[Multi*",
    "interop/test_parity_multi.py::test_synchronous[*lanes]",
    "interop/test_parity_multi.py::test_one_asynchronous_worker[*lanes*",
    "interop/test_private_names.py::test_parallel_envs_are_left_to_torchrl",
    "interop/test_parallel_envs.py::test_a_recurrent_policy_whose_state_the_workers_begin[random at first]",
    "resume/test_envs.py::test_lanes_in_processes_of_workers",
    "faults/test_parent.py::test_idle_workers_use_no_cpu",
    # Interpreters and actors that take a quarter of a minute to start, beside relatives that run.
    "backends/test_ray.py::test_an_actor_that_fails_is_replaced_or_left_out[restart]",  # gloo and RPC are replaced
    "backends/test_ray.py::test_actors_tell_their_episodes_and_share_what_their_envs_learn",
    "backends/test_ray.py::test_a_learners_loop_ends_with_the_collector",  # processes do
    "backends/test_weight_strategies.py::test_models_of_envs_in_workers_have_one_too[True]",
    "background/test_running.py::test_a_program_may_end_while_it_runs",
    "envs/test_seeds.py::test_pools_of_several_workers_differ[async]",
    "video/test_video.py::test_atari_ids_need_no_import[Evaluator",
    "envs/test_jax.py::test_gymnax_wrappers_are_refused",
    # Another version of a library breaks them, and the house finds a private name that is new.
    "interop/test_private_names.py::test_all_is_collected_with_them",
    "interop/test_private_names.py::test_the_same_is_collected_without",
    "interop/test_private_names.py::test_gymnasiums_checks_stay_without",
    "interop/test_private_names.py::test_ray_does_without_its_private_module",
    # Every message and every fault is waited for; some of each are in make test.
    "faults/test_deaths_between_messages.py::test_a_run_that_is_repeated_exactly_begins_anew_exactly[back-",
    "faults/test_deaths.py::test_in_a_step[2-MultiAsyncCollector-",
    "background/test_sample_while.py::test_a_pause_of_another_thread_is_waited_for[sync]",
    "background/test_sample_while.py::test_a_pause_of_another_thread_is_waited_for[ready]",
    "interop/test_parity_multi.py::test_synchronous[defaults spelled out]",
    "interop/test_parity_multi.py::test_synchronous[factories]",
    "interop/test_parity_multi.py::test_synchronous[version]",
    "interop/test_parity_multi.py::test_compact_observations_keep_nothing_else",
    "interop/test_parity_multi.py::test_first_batch_truncated_at_its_end",
    "interop/test_parallel_envs.py::test_the_same_as_torchrls[CartPole-v1-lanes-{'max_frames_per_traj': 5}]",
)


def is_slow(name: str) -> bool:
    """Whether a test, named from tests/ on, is one of these."""
    return _PATTERN.match(name) is not None


_PATTERN = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in SLOW))
