"""The situations of users that were reported or tried by hand, and the test that holds each."""

import ast

import pytest

from tests.conftest import ROOT

# By the name of the situation: a test, as pytest names it below tests/.
CASES = {
    "batch_norm_recomputed": (
        "project/test_steps.py::test_recomputed_activations_update_buffers_once"
    ),
    "batch_objects": "project/test_inputs.py::test_batches_of_any_class_are_moved",
    "buffers_assigned_anew": "project/test_steps.py::test_a_bad_step_leaves_batch_statistics_alone",
    "callback_state": "project/test_callback_state.py::test_a_state_comes_back_as_it_was",
    "channels_first": "project/test_data.py::test_arrays_with_their_channels_first_are_refused",
    "complex_weights": "project/test_optimizer.py::test_complex_weights_have_no_fused_kernel",
    "cruft_monorepo": (
        "template/test_updating.py::test_a_project_in_a_larger_repository_is_updated"
    ),
    "data_rewritten": "project/test_inputs.py::test_a_token_file_that_changes_under_a_run_is_named",
    "detection_targets": (
        "project/test_program.py::test_a_model_of_a_list_of_images_has_a_program_for_one_image"
    ),
    "exif_orientation": "project/test_data.py::test_images_of_phones_and_browsers_are_read",
    "figure_int_zero": "project/test_metrics.py::test_a_checkpoint_with_a_score_of_zero_is_good",
    "forkserver_default": "project/test_collate.py::test_what_workers_cannot_be_sent_is_named",
    "frozen_eval": "project/test_model_state.py::test_parts_in_evaluation_mode_stay_so",
    "fsdp_mixed_dtype": "project/test_mistakes.py::test_fsdp_names_what_it_cannot_shard",
    "fsdp_scalar": "project/test_mistakes.py::test_ranks_refuse_a_scalar_under_fsdp_once",
    "hangup_unsaved": "project/test_terminal.py::test_a_hangup_saves_and_stops",
    "hf_folder": (
        "project/test_transformers.py::test_a_folder_computes_and_writes_what_the_run_does"
    ),
    "hidden_class_folder": "project/test_data.py::test_what_is_no_image_of_a_class_is_passed_over",
    "infer_without_data": "project/test_travel.py::test_infer_needs_no_training_data",
    "init_other_head": "project/test_base.py::test_a_head_of_another_size_begins_anew",
    "int8_frozen": (
        "project/test_program.py::test_computed_and_quantized_weights_resume_and_are_exported"
    ),
    "json_lines_names": "project/test_inputs.py::test_json_lines_are_documents_under_any_name",
    "late_buffer": (
        "project/test_model_state.py::test_a_buffer_that_the_first_step_makes_is_refused"
    ),
    "lazy_modules": "project/test_mistakes.py::test_parameters_that_cannot_be_trained_are_named",
    "metric_named_loss": "project/test_metrics.py::test_a_metric_has_a_name_of_its_own",
    "micro_batch_of_one": "project/test_draws.py::test_micro_batches_are_near_equal",
    "mlflow_names": "project/test_tracker.py::test_names_that_mlflow_refuses_are_logged_by_others",
    "mlflow_odd_folder": (
        "project/test_tracker.py::test_names_that_mlflow_refuses_are_logged_by_others"
    ),
    "nan_metric": (
        "project/test_model_state.py::test_a_metric_that_is_not_a_number_is_shown_and_named_once"
    ),
    "nohup_hup": "project/test_terminal.py::test_a_hangup_does_nothing_under_nohup",
    "odd_samples": "project/test_collate.py::test_samples_that_cannot_be_stacked_are_one_line",
    "overfit_random_transforms": (
        "project/test_draws.py::test_what_stands_around_a_dataset_changes_no_draws"
    ),
    "overlay_lower": "project/test_file_systems.py::test_a_run_in_an_image_goes_on_and_prunes",
    "parameter_order": "project/test_model_state.py::test_ranks_notice_what_would_make_them_differ",
    "parametrized": (
        "project/test_program.py::test_computed_and_quantized_weights_resume_and_are_exported"
    ),
    "pt2_own_models": "project/test_program.py::test_a_program_takes_what_the_loss_gives_the_model",
    "python_flags": "project/test_entrances.py::test_python_may_be_started_with_any_flags",
    "random_transforms": "project/test_draws.py::test_a_resume_and_loader_workers_draw_the_same",
    "random_uid": "project/test_terminal.py::test_a_user_without_name_or_home_trains",
    "rank_in_environment": "project/test_mistakes.py::test_other_ways_to_start_are_one_line",
    "run_as_script": "project/test_mistakes.py::test_other_ways_to_start_are_one_line",
    "schedule_free": "project/test_optimizer.py::test_another_optimizer_trains_and_resumes_exactly",
    "settings_without_config": (
        "project/test_inputs.py::test_checkpoints_without_settings_say_what_to_do"
    ),
    "shm_small": "project/test_collate.py::test_full_shared_memory_is_one_line",
    "sizes": "project/test_sizes.py::test_a_few_samples_have_the_same_losses_on_more_ranks",
    "sparse_embedding": (
        "project/test_mistakes.py::test_parameters_that_cannot_be_trained_are_named"
    ),
    "split_folders": "project/test_data.py::test_a_folder_may_be_divided_already",
    "srun_without_torchrun": "project/test_mistakes.py::test_other_ways_to_start_are_one_line",
    "std_closed": "project/test_terminal.py::test_closed_streams_end_nothing",
    "stop_between_saves": (
        "project/test_steps.py::test_ranks_agree_on_running_buffers_after_each_step"
    ),
    "suspended": "project/test_terminal.py::test_a_job_that_stands_still_goes_on",
    "tilde_in_toml": "project/test_inputs.py::test_a_tilde_in_a_file_is_the_home_directory",
    "toml_bom": "project/test_data.py::test_settings_of_a_windows_editor_are_read",
    "torchrun_direct": "cluster/test_launch.py::test_plain_torchrun_restarts_its_ranks",
    "unfreeze_later": "project/test_model_state.py::test_ranks_notice_what_would_make_them_differ",
    "unused_on_one_rank": (
        "project/test_mistakes.py::test_ranks_name_a_parameter_that_one_of_them_uses"
    ),
    "unused_parameter": (
        "project/test_mistakes.py::test_ranks_name_an_unused_parameter_and_the_setting"
    ),
    "utf16_left_out": "project/test_data.py::test_what_is_not_text_in_utf_8_is_left_out_and_named",
    "wandb_home": "project/test_tracker.py::test_a_user_without_a_home_has_an_offline_log",
    "wandb_mode": "project/test_tracker.py::test_settings_of_the_users_own_win",
    "worker_holds_gil_sigterm": (
        "project/test_endings.py::test_a_stop_ends_the_wait_for_a_worker_that_hangs"
    ),
    "worker_long_tmpdir": (
        "project/test_endings.py::test_a_temporary_folder_of_a_long_name_ends_the_run"
    ),
}
# Models that FSDP has to train as DDP does, or refuse: each is a class of drills/twins.py.
TWINS = {
    "fsdp_block_called_thrice": "BlockCalledThrice",
    "fsdp_buffer_of_parameter": "BufferOfParameter",
    "fsdp_expanded_fill": "FilledByView",
    "fsdp_grad_hook": "GradientHook",
    "fsdp_int8_frozen": "FrozenInt8",
    "fsdp_list_reference_large": "ParameterInList",
    "fsdp_nested_blocks": "Nested",
    "fsdp_output_dict": "Outputs",
    "fsdp_param_attribute": "Attribute",
    "fsdp_same_block_twice": "SameBlockTwice",
    "fsdp_sparse_buffer": "SparseBuffer",
    "fsdp_tie_across_blocks": "TiedAcrossBlocks",
    "fsdp_tie_block_root": "TiedToTheRoot",
    "fsdp_weight_norm": "Parametrized",
}
TWIN_TEST = "cluster/test_hybrid.py::test_fsdp_trains_what_ddp_trains_or_refuses_it"
CASES |= dict.fromkeys(TWINS, TWIN_TEST)


@pytest.mark.parametrize("name", CASES)
def test_each_situation_has_a_test(name: str) -> None:
    """One that pytest collects; a renamed test is renamed here, too."""
    file, _, test = CASES[name].partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert test.startswith("test_") and test in names


def test_the_models_of_both_wrappers_are_tried() -> None:
    """Each class of TWINS is in the drill, among the models that are the same or are refused."""
    tree = ast.parse((ROOT / "tests/project/drills/twins.py").read_text("utf-8"))
    tried: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in {"SAME", "REFUSED"}:
            tried |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    assert set(TWINS.values()) <= tried
