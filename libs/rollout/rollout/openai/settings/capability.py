"""What an engine behind an OpenAI-compatible server can do, with the test that showed it, or why not."""

from seqpack.capability import No, Yes

NO_WEIGHTS = "an OpenAI-compatible server has no request that replaces weights: train with backend native or vllm"
NO_MEDIA = "a prompt of token ids has no place for images in a completion request"
_SERVERS = "the server chooses its devices and does not tell"

OPENAI: dict[str, Yes | No] = {
    "cpu": Yes("openai/engine_test.py::test_answers_are_those_of_the_engine_behind_the_server"),
    "cuda": No(_SERVERS),
    "npu": No(_SERVERS),
    "cancel": Yes("openai/engine_test.py::test_a_cancelled_request_answers_with_what_it_has"),
    "continuous_batching": Yes("openai/engine_test.py::test_so_many_requests_run_and_the_rest_wait"),
    "deadline": Yes("openai/engine_test.py::test_a_deadline_ends_a_request"),
    "load": Yes("openai/engine_test.py::test_so_many_requests_run_and_the_rest_wait"),
    "streaming": Yes("openai/engine_test.py::test_tokens_are_told_as_they_come"),
    "seeded_requests": Yes("openai/engine_test.py::test_answers_are_those_of_the_engine_behind_the_server"),
    "two_phase_weights": No(NO_WEIGHTS),
    "weights_under_way": No(NO_WEIGHTS),
    "in_process_weights": No(NO_WEIGHTS),
    "shared_weights": No(NO_WEIGHTS),
    "prefix_sharing": No(_SERVERS),
    "prefix_continuation": No(_SERVERS),
    "media": No(NO_MEDIA),
    "tensor_parallel": No(_SERVERS),
    "routed_experts": No("a stream of a completion does not tell which experts a token went to"),
}
