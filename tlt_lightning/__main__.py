"""`python -m tlt_lightning fit|validate|predict -c recipe.yaml`, `... drafter fit -c recipe.yaml` and `... export`."""

from tlt_lightning.cli import main

if __name__ == "__main__":
    main()
