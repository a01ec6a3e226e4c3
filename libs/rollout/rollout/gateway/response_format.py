"""Structured outputs that a request asks for: OpenAI's `response_format`, vLLM's `structured_outputs`."""

import json
from collections.abc import Mapping
from typing import Any

from rollout.gateway.request_error import refuse
from rollout.structured_outputs import StructuredOutputs

FORMAT, STRUCTURED = "response_format", "structured_outputs"
_FORMATS = '{"type": "text"}, {"type": "json_object"} and {"type": "json_schema", "json_schema": {"schema": ...}}'
_FIELDS = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace")


def read_structured(given: Mapping[str, Any]) -> StructuredOutputs:
    """Return what a request's parameters ask for. Raise RequestError (400) for forms that nothing here enforces."""
    wanted = _of_format(given.get(FORMAT))
    if STRUCTURED in given:
        if wanted:
            refuse(f"{FORMAT} and {STRUCTURED} both constrain the answer: give one of them", STRUCTURED)
        wanted = _of_fields(given[STRUCTURED])
    if wanted and given.get("stop"):
        refuse("stop would end a structured output before it is whole: leave one of them out", "stop")
    return wanted


def _of_format(given: Any) -> StructuredOutputs:
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or given == {} or kind == "text":
        return StructuredOutputs()
    if kind == "json_object" and len(given) == 1:
        return StructuredOutputs(json_object=True)
    form = given.get("json_schema") if kind == "json_schema" and len(given) == 2 else None
    if not isinstance(form, dict):
        refuse(f"{FORMAT} is one of {_FORMATS}, got {json.dumps(given):.200}", FORMAT, "unsupported_parameter")
    if unknown := sorted(form.keys() - {"name", "description", "schema", "strict"}):
        refuse(f"{FORMAT}.json_schema.{unknown[0]} is not supported: leave it out", FORMAT, "unsupported_parameter")
    if not isinstance(form.get("schema"), dict):
        refuse(f"{FORMAT}.json_schema.schema must be a JSON schema, an object", FORMAT)
    return StructuredOutputs(json=json.dumps(form["schema"]))


def _of_fields(given: Any) -> StructuredOutputs:
    if not isinstance(given, dict):
        refuse(f"{STRUCTURED} must be an object with one of {', '.join(_FIELDS[:-1])}", STRUCTURED)
    fields = {name: value for name, value in given.items() if value is not None and value is not False}
    if unknown := sorted(fields.keys() - set(_FIELDS)):
        refuse(f"{STRUCTURED}.{unknown[0]} is not supported: leave it out", STRUCTURED, "unsupported_parameter")
    if isinstance(fields.get("json"), dict):
        fields["json"] = json.dumps(fields["json"])
    if isinstance(fields.get("choice"), list):
        fields["choice"] = tuple(fields["choice"])
    for name in ("json_object", "disable_any_whitespace"):
        if fields.get(name, True) is not True:
            refuse(f"{STRUCTURED}.{name} must be true or false", STRUCTURED)
    try:
        wanted = StructuredOutputs(**fields)
    except ValueError as error:
        refuse(f"{STRUCTURED}: {error}", STRUCTURED)
    if not wanted:
        refuse(f"{STRUCTURED} must be an object with one of {', '.join(_FIELDS[:-1])}", STRUCTURED)
    return wanted
