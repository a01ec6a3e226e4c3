"""Capabilities as code: what each backend can do, with the test that showed it, or why not."""

from collections.abc import Mapping

from rollout.backends import EachBackend
from rollout.config import RolloutConfig
from rollout.structured_outputs import NO_TOKENIZER
from seqpack.capability import Supported, Unsupported

NATIVE: dict[str, Supported | Unsupported] = {
    "cpu": Supported("native/engine_test.py::test_log_probs_are_the_modules_own_for_mixed_lengths"),
    "cuda": Supported("native/engine_gpu_test.py::test_log_probs_are_the_modules_own_on_the_device"),
    "npu": Unsupported("no Ascend device was at hand: nothing ran on one yet", untested="npu"),
    "cancel": Supported("native/walls_test.py::test_a_cancelled_request_answers_with_what_it_has"),
    "continuous_batching": Supported(
        "native/scheduler/batch_test.py::test_a_short_request_beside_long_ones_waits_for_one_step"
    ),
    "deadline": Supported("native/walls_test.py::test_a_deadline_ends_a_request"),
    "two_phase_weights": Supported("sync/workers_test.py::test_all_workers_take_the_new_weights"),
    "weights_under_way": Supported("native/live_test.py::test_weights_are_swapped_under_way"),
    "in_process_weights": Supported("native/engine_test.py::test_update_weights_is_loading_the_state_dict"),
    "shared_weights": Supported("native/sharing_test.py::test_a_trainers_steps_are_sampled_as_from_copies"),
    "streaming": Supported("native/streaming_test.py::test_streamed_tokens_are_the_completions_own"),
    "load": Supported("native/streaming_test.py::test_load_counts_who_runs_and_who_waits"),
    "seeded_requests": Supported("native/engine_test.py::test_a_seed_fixes_a_request_whatever_its_neighbours"),
    "score": Supported("native/decoders/decoders_test.py::test_scores_are_those_of_the_whole_softmax"),
    "prefix_sharing": Supported("native/engine_test.py::test_groups_share_a_prefill_and_still_agree"),
    "prefix_continuation": Supported("native/continuation_test.py::test_a_turn_reads_what_is_new_alone"),
    "media": Supported("native/decoders/media_test.py::test_greedy_answers_are_those_of_the_modules_generate"),
    "tensor_parallel": Unsupported("the native engine holds a whole model in one process"),
    "structured_outputs": Supported("native/scheduler/grammars_test.py::test_log_probs_are_of_what_the_grammar_leaves"),
    "routed_experts": Supported("native/decoders/routers_test.py::test_the_experts_told_are_the_modules_own_choice"),
}


def feature_of(features: Mapping[str, Supported | Unsupported], feature: str) -> Supported | Unsupported:
    """Return whether a feature is supported. Raise ValueError with all features for an unknown name."""
    if feature not in features:
        raise ValueError(f"unknown feature {feature!r}; known are {', '.join(sorted(features))}")
    return features[feature]


FEATURES = EachBackend(lambda backend: backend.features)
BACKENDS = EachBackend(lambda backend: backend.features["cpu"])


def supports(config: RolloutConfig, feature: str) -> Supported | Unsupported:
    """Return whether an engine of this configuration has the feature; backends are features too.

    Raises ValueError with all features for an unknown name.
    """
    if feature == "structured_outputs" and config.tokenizer is None and config.backend != "openai":
        return Unsupported(NO_TOKENIZER)
    return backend_supports(config.backend, feature)


def backend_supports(backend: str, feature: str) -> Supported | Unsupported:
    """Return the same of a backend, also of one that is not in this installation."""
    try:
        if feature in BACKENDS:
            return BACKENDS[feature]
        features = FEATURES[backend]
    except ValueError as error:
        return Unsupported(str(error))
    answer = feature_of(features, feature)
    return answer if features["cpu"] else features["cpu"]


def refuse_unsupported(config: RolloutConfig) -> None:
    """Raise ValueError with the reason where the backend of this configuration is not supported."""
    answer = supports(config, config.backend)
    if isinstance(answer, Unsupported):
        raise ValueError(f"{config.backend} is not supported: {answer.reason}")
