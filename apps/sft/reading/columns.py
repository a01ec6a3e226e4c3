"""What is read of a row and what is trained of it: settings, which import no torch."""

from dataclasses import dataclass
from typing import Literal

Form = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokens"]
BadRows = Literal["error", "skip"]
"""What is done with rows that can't be used: all of a file are told and nothing is trained, or they are left out."""
Truncation = Literal["skip", "left", "right"]
"""What is done with a row that is too long: leave it out, or cut tokens off at its beginning or its end."""
TrainOn = Literal["assistant", "last", "completion", "all", "user", "system", "developer", "tool"]
"""What is trained of a row: the turns of roles, the assistant's last one, the completion, or everything."""
ALONE = ("last", "completion", "all")
"""Values that go with no other."""


@dataclass(frozen=True)
class Columns:
    """The columns of a file, the form of its rows ("auto" is decided by the first row), and what is trained of them."""

    form: Form = "auto"
    messages: str = "messages"
    tools: str = "tools"
    prompt: str = "prompt"
    completion: str = "completion"
    text: str = "text"
    images: str | None = None
    """Where images of conversations may be besides their messages; None where the model is trained on text alone."""
    train_on: tuple[TrainOn, ...] = ("assistant",)
    reasoning_weight: float = 1.0
    end_of_turn: str | None = None

    @property
    def conversations(self) -> str:
        """The column with the turns of ShareGPT's rows."""
        return self.messages if self.messages != Columns.messages else "conversations"
