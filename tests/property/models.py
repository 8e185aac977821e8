"""What the models of the state machines share."""

from __future__ import annotations

import sys

from hypothesis.stateful import RuleBasedStateMachine


class EndingModel(RuleBasedStateMachine):
    """A model that demands something of a run that has come to its end."""

    def at_end(self) -> None:
        """Check what must hold after the last rule."""
        raise NotImplementedError

    def teardown(self) -> None:
        """Check the end of a run that was not cut off.

        A rule that has nothing left to draw from, or that fails, leaves the model half changed: the end would
        blame the machine for it, and hide what the rule said.
        """
        if sys.exc_info()[0] is None:
            self.at_end()
