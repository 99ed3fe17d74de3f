"""Tasks written with the classes of `verifiers` since 0.4, for its own Python."""

import json
import os
from pathlib import Path

import verifiers.v1 as vf


class Adding(vf.Toolset[vf.ToolsetConfig]):
    """Adds."""

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumData(vf.TaskData):
    """A question with its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Asks for a sum, with a tool that adds."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Return the servers of tools."""
        return [Adding(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the last message holds the answer; write what the library has recorded of the messages."""
        said = [message.content or "" for message in trace.assistant_messages]
        if place := os.environ.get("RECORDED"):
            with Path(place).open("a") as file:
                print(json.dumps({"answer": self.data.answer, "said": said}), file=file)
        return float(self.data.answer in said[-1])


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Holds four sums."""

    def load(self) -> list[SumTask]:
        """Make the tasks."""
        return [SumTask(SumData(prompt=f"{n} + 9 =", answer=str(n + 9)), self.config.task) for n in range(4)]


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    Adding.run()
