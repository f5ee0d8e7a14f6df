"""A calculator as an environment: `!374+589$` is a call, answered with `963=`; any other response is the answer."""

import re

from relax_cli import EnvRow


class Calculator:
    """One episode. The end token `$` is not part of a response."""

    def reset(self, row: EnvRow) -> str:
        self.label = row.label
        return str(row.prompt)

    def step(self, response: str) -> tuple[str, float, bool]:
        if not response.startswith("!"):
            return "", float(response == self.label), True
        call = re.fullmatch(r"!(\d+)\+(\d+)", response)
        # A call that means nothing is answered as well, so that the next turn can be better.
        return (f"{int(call[1]) + int(call[2])}=" if call else "?="), 0.0, False
