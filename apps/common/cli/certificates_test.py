"""What a run tells and writes of its proofs, and which names --allow-untested takes."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from apps.common.cli.certificates import failures, report_when_slow, write_proofs
from apps.common.cli.untested import unknown_names, unused_names
from apps.common.data.model_files import config_fields
from engines.prove.certificate import Certificate

FIELDS = config_fields(LlamaConfig())
HOLDS = Certificate("lfm2", "x", "small", (1, 2), 0.0, 0.0, None, {"leak": 1.0}, ("conv_bias",), (), 0.1, {})


def test_a_resumed_run_keeps_what_it_stood_on(tmp_path: Path) -> None:
    write_proofs(tmp_path, [HOLDS], {"npu": "no device"})
    later = replace(HOLDS, versions={"torch": "3"}, seconds=9.0)
    write_proofs(tmp_path, [later], {"conv_bias": "not exercised"})
    write_proofs(tmp_path, [replace(later, seconds=1.0)], {})
    names = {path.name for path in (tmp_path / "certificates").iterdir()}
    assert names == {f"packed-rows-{one.hash}.json" for one in (HOLDS, later)}
    assert json.loads((tmp_path / "untested.json").read_text()) == {"npu": "no device", "conv_bias": "not exercised"}
    assert failures([HOLDS, replace(HOLDS, problems=("wrong by 3",))]) == [
        str(replace(HOLDS, problems=("wrong by 3",)))
    ]


def test_a_name_of_nothing_is_refused_and_one_without_need_is_told() -> None:
    parts = {"npu": "no device", "conv_bias": "not exercised"}
    assert not unknown_names(("npu", "nodes", "sampler", "conv_bias", "rms_norm_eps"), parts, FIELDS)
    (text,) = unknown_names(("npus", "conv_bia"), parts, FIELDS)
    assert text.startswith("--allow-untested npus,conv_bia: names are npu, nodes, sampler, deepep, teacher and fields")
    assert text.endswith("untested here: npu, conv_bias")
    assert unused_names(("npu", "sampler"), parts) == []
    assert unused_names(("nodes", "npu"), parts) == [
        "--allow-untested nodes was not needed: tests or a proof have run it"
    ]


@pytest.mark.parametrize(("seconds", "told"), [(0.0, False), (0.3, True)])
def test_what_takes_a_while_is_told(seconds: float, told: bool) -> None:
    lines: list[str] = []
    with report_when_slow("proving lfm2", quiet=0.1, tell=lines.append):
        time.sleep(seconds)
    assert any("proving lfm2: " in line for line in lines) == told
