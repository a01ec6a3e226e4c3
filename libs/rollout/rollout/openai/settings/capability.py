"""Capabilities of an engine behind an OpenAI-compatible server, with the test that showed each, or why not."""

from seqpack.capability import Supported, Unsupported

NO_WEIGHTS = "an OpenAI-compatible server has no request that replaces weights: train with backend native or vllm"
NO_MEDIA = "a prompt of token ids has no place for images in a completion request"
NO_GRAMMARS = "nothing tells whether a server masks as it was asked: take backend native or vllm"
_SERVERS = "the server chooses its devices and does not tell"

OPENAI: dict[str, Supported | Unsupported] = {
    "cpu": Supported("openai/engine_test.py::test_answers_are_those_of_the_engine_behind_the_server"),
    "cuda": Unsupported(_SERVERS),
    "npu": Unsupported(_SERVERS),
    "cancel": Supported("openai/engine_test.py::test_a_cancelled_request_answers_with_what_it_has"),
    "continuous_batching": Supported("openai/engine_test.py::test_so_many_requests_run_and_the_rest_wait"),
    "deadline": Supported("openai/engine_test.py::test_a_deadline_ends_a_request"),
    "load": Supported("openai/engine_test.py::test_so_many_requests_run_and_the_rest_wait"),
    "streaming": Supported("openai/engine_test.py::test_tokens_are_told_as_they_come"),
    "seeded_requests": Supported("openai/engine_test.py::test_answers_are_those_of_the_engine_behind_the_server"),
    "two_phase_weights": Unsupported(NO_WEIGHTS),
    "weights_under_way": Unsupported(NO_WEIGHTS),
    "in_process_weights": Unsupported(NO_WEIGHTS),
    "shared_weights": Unsupported(NO_WEIGHTS),
    "score": Supported("openai/engine_test.py::test_scores_are_those_of_the_engine_behind_the_server"),
    "prefix_sharing": Unsupported(_SERVERS),
    "prefix_continuation": Unsupported(_SERVERS),
    "media": Unsupported(NO_MEDIA),
    "tensor_parallel": Unsupported(_SERVERS),
    "structured_outputs": Unsupported(NO_GRAMMARS),
    "routed_experts": Unsupported("a stream of a completion does not tell which experts a token went to"),
}
