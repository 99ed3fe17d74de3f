"""Rewards of your own; `mine.yaml` names them."""


def brevity(prompt: str, response: str, row: dict) -> float:
    """Score short responses higher: 1 for no character, 1/2 for 200. `row` is the prompt's line of the data file."""
    return 200 / (200 + len(response))
