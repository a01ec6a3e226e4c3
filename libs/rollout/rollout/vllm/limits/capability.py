"""Capabilities of the vLLM engine, with the test that showed each, or why not."""

from seqpack.capability import Supported, Unsupported

VLLM: dict[str, Supported | Unsupported] = {
    "cpu": Supported("vllm/engine_test.py::test_log_probs_are_those_of_the_modules"),
    "cuda": Supported("vllm/sleep_gpu_test.py::test_ten_cycles_do_not_make_the_peak_grow"),
    "npu": Unsupported("no Ascend device was at hand: nothing ran on one yet", untested="npu"),
    "cancel": Supported("vllm/engine_test.py::test_a_cancelled_request_answers_with_what_it_has"),
    "continuous_batching": Supported("vllm/engine_test.py::test_a_short_request_beside_long_ones"),
    "deadline": Supported("vllm/engine_test.py::test_a_deadline_ends_a_request"),
    "load": Supported("vllm/engine_test.py::test_a_short_request_beside_long_ones"),
    "streaming": Supported("vllm/engine_test.py::test_tokens_are_told_as_they_come"),
    "two_phase_weights": Supported(
        "vllm/engine_weights_test.py::test_an_abort_after_the_commit_brings_the_old_weights_back"
    ),
    "weights_under_way": Supported("vllm/engine_weights_test.py::test_weights_are_swapped_under_way"),
    "shared_weights": Unsupported("vLLM is in a process of its own and lays weights out in its own way"),
    "in_process_weights": Supported("vllm/engine_weights_test.py::test_every_parameter_arrives"),
    "seeded_requests": Supported("vllm/engine_test.py::test_a_seed_fixes_a_request_whatever_its_neighbours"),
    "score": Supported("vllm/engine_test.py::test_scores_of_tokens_are_the_modules"),
    "prefix_sharing": Supported("vllm/engine_weights_test.py::test_the_prefix_cache_is_not_stale_after_an_update"),
    "prefix_continuation": Supported("vllm/engine_weights_test.py::test_the_prefix_cache_is_not_stale_after_an_update"),
    "media": Supported("vllm/client/images_test.py::test_log_probs_are_those_of_the_stock_module"),
    "structured_outputs": Supported("vllm/structured_outputs_test.py::test_log_probs_are_of_what_the_grammar_leaves"),
    "routed_experts": Supported("vllm/experts_test.py::test_the_experts_told_are_those_of_its_log_probs"),
    "sleep": Supported("vllm/sleep_gpu_test.py::test_ten_cycles_do_not_make_the_peak_grow"),
    "tensor_parallel": Supported(
        "vllm/workers_test.py::test_log_probs_are_those_of_the_module_before_and_after_an_update"
    ),
    "pipeline_parallel": Supported(
        "vllm/stages_test.py::test_log_probs_are_those_of_the_module_before_and_after_an_update"
    ),
    "data_parallel": Supported(
        "vllm/data_parallel_test.py::test_each_copy_has_the_modules_log_probs_before_and_after_an_update"
    ),
    "experts_over_copies": Supported(
        "vllm/experts_over_copies_test.py::test_each_copy_has_the_modules_log_probs_before_and_after_an_update"
    ),
    "expert_parallel": Supported(
        "vllm/workers_test.py::test_mixtures_have_the_modules_log_probs_before_and_after_an_update"
    ),
}
