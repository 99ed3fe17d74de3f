"""Let the policy act in several turns: environments as TRL has them, turns as tokens, calls beside the engine."""
