"""The messages that are no JSON are those of the SDK's own code."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from libra_cli.runtime.tinker.protobuf import read_fields
from libra_cli.runtime.tinker.wire import (
    NotServed,
    SampledTokens,
    read_training_pass,
    read_turn,
    write_sample,
    write_training_output,
)
from tests.live import require

require("tinker")


def types() -> Any:
    return importlib.import_module("tinker").types


def written(*data: Any, **more: Any) -> bytes:
    sdk, convert = types(), importlib.import_module("tinker.proto.request_conv")
    asked = sdk.ForwardBackwardInput(data=list(data), loss_fn="ppo", **more)
    request = sdk.ForwardBackwardRequest(forward_backward_input=asked, model_id="m:1", seq_id=300)
    message = convert.forward_backward_request_to_proto(request)
    return bytes(message.SerializeToString())


def test_a_request_of_the_sdk_is_read() -> None:
    sdk = types()
    inputs = {"target_tokens": [2, 3, 4], "advantages": [0.5, -1.0, 2.0]}
    one = sdk.Datum(model_input=sdk.ModelInput.from_ints([1, 2, 70000]), loss_fn_inputs=inputs)
    message = written(one, one, loss_fn_config={"clip_low_threshold": 0.9})
    asked = read_training_pass(message)
    assert (*read_turn(message), asked.loss) == ("m:1", 300, "ppo")
    assert (asked.settings, asked.forward_only) == ({"clip_low_threshold": 0.9}, False)
    assert np.frombuffer(asked.data[1]["tokens"], "i4").tolist() == [1, 2, 70000]
    kind, data = asked.data[1]["inputs"]["advantages"]
    assert (kind, np.frombuffer(data, "f4").tolist()) == ("float32", [0.5, -1.0, 2.0])
    kind, data = asked.data[0]["inputs"]["target_tokens"]
    assert (kind, np.frombuffer(data, "i8").tolist()) == ("int64", [2, 3, 4])


def test_a_matrix_is_refused() -> None:
    sdk = types()
    inputs: Any = {"target_tokens": np.ones((2, 3), dtype="i8")}
    one = sdk.Datum(model_input=sdk.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    with pytest.raises(NotServed, match="matrix"):
        read_training_pass(written(one))


def test_answers_are_read_by_the_sdk() -> None:
    convert = importlib.import_module("tinker.proto.response_conv")
    arrays = [np.array(one, "f4") for one in ([-1.0, -2.0], [-3.0])]
    message = write_training_output([one.tobytes() for one in arrays], {"loss:sum": 6.5})
    told = convert.deserialize_forward_backward_output(message)
    assert told.metrics == {"loss:sum": 6.5}
    assert [one["logprobs"].data for one in told.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]
    tokens = np.array([5, 6], "i4").tobytes()
    prompt = np.array([np.nan, -0.5], "f4").tobytes()
    sample = write_sample(
        [SampledTokens(tokens, arrays[0].tobytes(), stopped) for stopped in (True, False)], prompt
    )
    told = convert.deserialize_sample_response(sample)
    assert [one.stop_reason for one in told.sequences] == ["stop", "length"]
    assert (told.sequences[0].tokens, told.sequences[1].logprobs) == ([5, 6], [-1.0, -2.0])
    assert told.prompt_logprobs == [None, -0.5]


@pytest.mark.parametrize("message", [b"\x0a\x05ab", b"\x80", b"\x0b", b"\xff" * 12])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"field|number"):
        read_fields(message)
